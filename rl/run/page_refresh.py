"""Refreshes the run's page during training, in a subprocess; a failure is one warning."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rl.console import warn
from rl.files import current_path, private
from rl.printing import environment_without

MAX_WAIT_S = 40.0
BUSY = 75
"""Exit code of `rl report --refresh` while another report is being made."""
_LOW_PRIORITY = ("nice", "-n", "15")


class Page:
    """For rank 0. The writer's thread calls `refresh`; `close` is called when it has ended."""

    def __init__(self, run_dir: Path, wanted: bool) -> None:
        self._run_dir = run_dir
        self.wanted = wanted
        self._process: subprocess.Popen[bytes] | None = None
        self._has_warned = False

    def refresh(self) -> None:
        """Start making the page from the files on disk, unless a refresh is running."""
        if self.wanted and not self._is_running():
            self._start(_LOW_PRIORITY)

    def close(self, finished: bool = True) -> None:
        """Make the last page and wait for it, unless the run failed or was stopped. Leaves no
        subprocess behind."""
        # Kill a slow low-priority refresh; the next one reuses the pages that it has finished.
        self._end()
        if not (finished and self.wanted):
            return
        self._start()
        if self._process is None:
            return
        try:
            self._process.wait(MAX_WAIT_S)
            if self._process.returncode == BUSY:
                self._warn("another report is being made")
            self._is_running()
        except subprocess.TimeoutExpired:
            warn(
                f"{self._run_dir / 'report'}: the last page takes longer than {MAX_WAIT_S:g} s and "
                f"is incomplete; rl report {self._run_dir} makes the rest"
            )
            self._end()

    def _start(self, prefix: Sequence[str] = ()) -> None:
        program = [sys.executable, "-m", "rl.tools.commands.report"]
        try:
            command = [*prefix, *program, str(current_path(self._run_dir)), "--refresh"]
            self._log.parent.mkdir(parents=True, exist_ok=True)
            with open(self._log, "wb", opener=private) as log:
                # Own session, so that Ctrl-C does not end this process, for which the run waits.
                self._process = subprocess.Popen(
                    command,
                    env=environment_without(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as error:
            self._warn(str(error))

    @property
    def _log(self) -> Path:
        return current_path(self._run_dir) / "logs" / "report.log"

    def _end(self) -> None:
        if self._is_running() and self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _is_running(self) -> bool:
        """Whether a refresh is running; warns if the last one failed."""
        code = None if self._process is None else self._process.poll()
        if code is None:
            return self._process is not None
        self._process = None
        if code not in (0, BUSY):
            self._warn(f"exit code {code}; see {self._log}")
        return False

    def _warn(self, why: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warn(
                f"{self._run_dir / 'report'}: the page could not be refreshed ({why}; logged "
                f"once); rl report {self._run_dir} makes it at any time"
            )
