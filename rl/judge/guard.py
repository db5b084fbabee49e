"""Ends a started judge when its run ends: `python -m rl.judge.guard <pid> <folder> <command>`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

from rl.ranks.signals import STOP_SIGNALS, die_with_parent

GRACE_S = 5.0
"""Time between SIGTERM and SIGKILL, s."""
POLL_S = 0.1
CANNOT_START = 127
"""Exit code for a command that cannot be started, as in a shell."""


def main() -> None:
    """Exit code: the command's own, 128+n when signal n ended it."""
    run_pid, folder, *command = int(sys.argv[1]), *sys.argv[2:]
    signals: list[int] = []
    for signum in STOP_SIGNALS:
        signal.signal(signum, lambda number, _: signals.append(number))
    try:
        judge = subprocess.Popen(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C must not end the judge while the run saves
            preexec_fn=die_with_parent,  # in case this process is killed
        )
    except OSError as error:
        print(f"{command[0]!r} cannot be started: {error.strerror}", file=sys.stderr)
        sys.exit(CANNOT_START)
    while judge.poll() is None and not signals and os.getppid() == run_pid:
        time.sleep(POLL_S)
    for signum, timeout_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, None)):
        with suppress(ProcessLookupError):
            os.killpg(judge.pid, signum)
        with suppress(subprocess.TimeoutExpired):
            judge.wait(timeout_s)
    code = judge.returncode
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
