"""Starts the process that shows a run, `rl follow`: its page, wandb, TensorBoard and trackio. It
reads only the run folder, so that nothing that it does can delay or end training."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from shlex import quote

from rl.config.schema import TrackingConfig
from rl.files import private, require_in_place
from rl.printing import environment_without
from rl.record.run_summary import is_locked

LOG = "logs/follow.log"
LOCK = "logs/follow.{}.lock"
"""Held by the process that sends the run to the tracker of that name, or writes its page."""
LIMIT_S = 60.0
"""Seconds that the follower of an ended run may take for the last rows."""
ENDED, FAILED = b"ended", b"failed"
"""What the run writes to the follower's stdin at its end; nothing if it is killed."""
SAID = b"follow: "
"""Beginning of the follower's lines that are no warnings."""
WANDB_KEY = "WANDB_API_KEY"
_END_S = 5.0
"""Seconds that the follower gets to exit after `LIMIT_S`."""


def say(line: str) -> None:
    """Print on stderr; a full disk or a closed pipe ends nothing."""
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)


class Lines:
    """The whole lines of a growing file that were not read before."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def new(self) -> list[bytes]:
        try:
            # Without waiting: reading a named pipe in place of the file then raises OSError.
            with open(
                self._path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)
            ) as file:
                file.seek(self._offset)
                whole, end, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._offset += len(whole + end)
        return whole.split(b"\n") if end else []

    def show(self) -> None:
        """Print the new ones that are for the console: warnings, and those that begin with SAID."""
        with suppress(OSError):  # a network's file system
            for line in self.new():
                if line.startswith((b"WARNING: ", SAID)):
                    say(line.removeprefix(SAID).decode(errors="replace"))


@cache
def _log_of(run_dir: Path) -> Lines:
    """One in a process, so that it prints each line once; without those of earlier starts."""
    lines = Lines(run_dir / LOG)
    with suppress(OSError):
        lines.new()
    return lines


class Follower:
    """For rank 0, whose main thread calls it."""

    def __init__(self, run_dir: Path, tracking: TrackingConfig, is_main: bool = True) -> None:
        shows = tracking.page or tracking.tensorboard or tracking.trackio
        self._wanted = is_main and (shows or tracking.wandb != "off")
        self.makes_page = tracking.page
        self._run_dir = run_dir
        # All of a service's variables: without a WANDB_BASE_URL that has a password, wandb would
        # send the run to its public server.
        uses = {"WANDB_": tracking.wandb == "online", "HF_": tracking.trackio_space}
        self._prefixes = tuple(prefix for prefix, is_used in uses.items() if is_used)
        self._lines = _log_of(run_dir)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the follower if one is wanted."""
        if not self._wanted:
            return
        keys = [name for name in (WANDB_KEY, *os.environ) if name.startswith(self._prefixes)]
        follow = [sys.executable, "-m", "rl.tools.commands.follow", str(self._run_dir)]
        try:
            require_in_place(self._run_dir)
            (self._run_dir / LOG).parent.mkdir(parents=True, exist_ok=True)
            with open(self._run_dir / LOG, "ab", opener=private) as log:
                self._process = subprocess.Popen(
                    [*follow, "--with-run"],
                    env=environment_without(*keys),
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # a Ctrl-C is the run's
                )
        except OSError as error:
            self._warn(f"cannot be started ({error})")

    def look(self) -> None:
        """Print what the follower has to say, and once that it has ended."""
        if not self._wanted:
            return
        self._lines.show()
        if self._process is not None and self._process.poll() is not None:
            self._warn(f"ended (exit code {self._process.returncode}; {LOG} in the run's folder)")
            self._process = None

    def close(self, failed: bool) -> None:
        """Tell the follower that the run has ended; it sends the last rows, and ends."""
        if self._process is not None and self._process.stdin is not None:
            self.look()
            with suppress(OSError):  # it has ended already
                self._process.stdin.write(FAILED if failed else ENDED)
                self._process.stdin.close()

    def _warn(self, what: str) -> None:
        run = quote(str(self._run_dir))
        say(
            f"WARNING: the process that sends this run to its trackers {what}; at any time, "
            f"rl follow {run} sends what is missing"
        )


def wait_for_last_rows(run_dir: Path, stopped: Callable[[], bool]) -> None:
    """Wait while the follower of a run that has ended sends the last rows: at most `LIMIT_S` s and
    a little, or until `stopped`. Prints what the follower says meanwhile: for a view that is not
    complete, the command that sends the rest."""
    lines, until_s = _log_of(run_dir), time.monotonic() + LIMIT_S + _END_S
    while any(map(is_locked, run_dir.glob(LOCK.format("*")))):
        if stopped() or time.monotonic() > until_s:
            say(f"not waited for the last rows: rl follow {quote(str(run_dir))} sends them")
            break
        time.sleep(0.1)
    lines.show()
