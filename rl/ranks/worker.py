"""Runs the script in one rank: `python -m rl.ranks.worker <logs> <notes> <script> [args]`."""

from __future__ import annotations

import atexit
import json
import os
import runpy
import signal
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from rl import printing
from rl.files import private
from rl.printing import Lossy
from rl.ranks import heartbeat, signals
from rl.ranks.dist import PeerError
from rl.ranks.signals import die_with_parent
from rl.ranks.supervision import FINISHED_CODE


def main() -> None:
    """Run the script as `__main__`, with `sys.argv` as if it had been started directly."""
    exit_codes: list[int] = []
    atexit.register(leave, exit_codes)  # the first to register is the last to be called
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # while it loads, Ctrl-C prints no traceback
    printing.open_closed_streams()
    log_dir, note_dir, target, *args = sys.argv[1:]
    rank = int(os.environ["RANK"])
    log = Path(log_dir) / f"rank_{rank}.log"
    try:
        _send_output_to(log, on_console=rank == 0)
        stacks = open(log, "a", encoding="utf-8", opener=private)  # noqa: SIM115 - open until the end
    except OSError as error:
        sys.exit(f"rank {rank} cannot write its log: {signals.sentence(error) or error}")
    printing.guard()
    heartbeat.start(Path(note_dir) / heartbeat.file_name(rank), stacks)
    note = Path(note_dir) / f"rank_{rank}.json"
    sys.argv = [target, *args]
    try:
        if target.endswith(".py"):
            sys.path[0] = str(Path(target).resolve().parent)
            runpy.run_path(target, run_name="__main__")
        else:
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        exit_codes.append(FINISHED_CODE)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        _write_note(note, ended_ns=time.time_ns(), reason=f"SystemExit: {error.code}")
        is_end = code == 0 and target != "rl.train"  # which ends by returning
        exit_codes.append(FINISHED_CODE if is_end else code)
        raise
    except BaseException as error:  # a plugin may raise KeyboardInterrupt or GeneratorExit, too
        trace = traceback.format_exc().rstrip()
        text = signals.sentence(error)
        _write_note(
            note,
            ended_ns=time.time_ns(),
            reason=text or trace,
            only_heard=isinstance(error, PeerError),
        )
        if text is not None:
            with suppress(OSError), open(log, "a", encoding="utf-8", opener=private) as file:
                print(printing.plain(trace), file=file)
        print(text or trace, file=sys.stderr)
        exit_codes.append(1)
        sys.exit(1)


def leave(codes: list[int]) -> None:
    """If the script has ended, ends the process before the destructors of C++ libraries (Gloo,
    vLLM) run, because these destructors have aborted finished runs."""
    if codes:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(codes[0])


def _write_note(note: Path, **row: Any) -> None:
    """Write the note atomically: on a full disk the previous note stays. The rank with the lowest
    `ended_ns` is the cause, because its peers fail milliseconds later; but a rank that only
    received another rank's error (`only_heard`) may end before the other rank has saved."""
    temporary = note.with_suffix(".tmp")
    with suppress(OSError):
        temporary.write_text(json.dumps(row))
        temporary.replace(note)


def _send_output_to(path: Path, on_console: bool) -> None:
    """Send stdout and stderr to one file; later starts append to it. With `on_console` they also
    stay on the console; output to a terminal, which redraws lines, is not copied to the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if on_console and sys.stdout.isatty():
        return
    file = open(  # noqa: SIM115 - open until the end
        path, "a", buffering=1, encoding="utf-8", opener=private
    )
    file.write(f"=== {time.strftime('%Y-%m-%d %H:%M:%S')} pid {os.getpid()}\n")
    if on_console:
        sys.stdout, sys.stderr = Lossy(sys.stdout, file), Lossy(sys.stderr, file)
    else:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        sys.stdout, sys.stderr = Lossy(sys.stdout), Lossy(sys.stderr)


if __name__ == "__main__":
    main()
