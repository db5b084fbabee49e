"""Refreshes a run's own page by a process that yields to it; a failure is one warning."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rl.files.private import private
from rl.record.console import warn

MAX_WAIT_S = 40.0
"""At the end of a run, for the last page; one that takes longer is left to the user."""
BUSY = 75
"""Exit code of `rl report --refresh` while another report is being made."""
_YIELDING = ("nice", "-n", "15")
"""While the run trains."""


class Page:
    """Of rank 0. `refresh` belongs to the writer's thread; `close` comes when that has ended."""

    def __init__(self, run_dir: Path, wanted: bool) -> None:
        self._run_dir = run_dir
        self._wanted = wanted
        self._process: subprocess.Popen[bytes] | None = None
        self._has_warned = False

    @property
    def _log(self) -> Path:
        return self._run_dir / "logs" / "report.log"

    def refresh(self) -> None:
        """Have the page made of what is on disk; nothing while an earlier one is still made."""
        if self._wanted and not self._is_running():
            self._start(_YIELDING)

    def _start(self, before: Sequence[str] = ()) -> None:
        program = [sys.executable, "-m", "rl.commands.report"]
        command = [*before, *program, str(self._run_dir), "--refresh"]
        try:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            with open(self._log, "wb", opener=private) as log:
                # A session of its own: Ctrl-C is the run's, whose end waits for this.
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as error:
            self._warn(str(error))

    def close(self, finished: bool = True) -> None:
        """The last page, waited for; a run that failed, or was asked to stop, waits for none.
        Leaves no process."""
        # What yields to others may wait for long; what it has made is not made again.
        self._end()
        if finished and self._wanted:
            self._start()
            self._wait()

    def _wait(self) -> None:
        if self._process is None:
            return
        try:
            self._process.wait(MAX_WAIT_S)
            if self._process.returncode == BUSY:
                self._warn("another report is being made")
            self._is_running()
        except subprocess.TimeoutExpired:
            warn(
                f"{self._run_dir / 'report'}: the last page takes longer than {MAX_WAIT_S:g} s, "
                f"and is not whole yet; rl report {self._run_dir} makes what is left of it"
            )
            self._end()

    def _end(self) -> None:
        if self._is_running() and self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _is_running(self) -> bool:
        """Whether one is made now; the end of one that failed is said."""
        if self._process is None:
            return False
        code = self._process.poll()
        if code is None:
            return True
        self._process = None
        if code not in (0, BUSY):
            self._warn(f"exit code {code}; {self._log} says why")
        return False

    def _warn(self, why: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warn(
                f"{self._run_dir / 'report'}: the page could not be refreshed ({why}; said once); "
                f"rl report {self._run_dir} makes it at any time"
            )
