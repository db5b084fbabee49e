"""trackio's files in `<run>/trackio`, or a Space of the hub that the config names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from rl.config.schema import RunConfig
from rl.console.console import warn
from rl.files.private import unshare
from rl.text.markdown import text
from rl.trackers.tracker_page import ServicePage, Table, call_within, tried

PLACES = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_WEBHOOK_URL", "TRACKIO_BUCKET_ID")
"""Environment variables that would have trackio send a run's data elsewhere."""
START_TIMEOUT_S = 120.0
MAX_CELL_CHARS = 600


class TrackioPage(ServicePage):
    """Holds each iteration once, though a resumed run may do it again."""

    name = "trackio"

    def __init__(self, module: Any, run: Any) -> None:
        super().__init__(module, run)
        self._first_step: int = run._next_step
        """The first iteration that the page of a resumed run does not hold yet."""
        self._waiting: dict[str, Any] = {}
        """Tables, logged with the iteration's metrics as one row, so that both are there or not."""
        self._last_iteration = 0

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        waiting, self._waiting = self._waiting, {}
        self._last_iteration = iteration
        if iteration >= self._first_step:
            self._run.log({**metrics, **waiting}, step=iteration)

    def log_table(self, table: Table) -> None:
        # trackio reads words as Markdown.
        rows = [
            [text(cell, MAX_CELL_CHARS) if isinstance(cell, str) else cell for cell in row]
            for row in table.rows
        ]
        shown = self.table(table.columns, rows)
        if table.iteration is None:
            self._run.log({table.name: shown}, step=self._last_iteration)
        else:
            self._waiting[table.name] = shown


def open_page(run_dir: Path, config: RunConfig, written: Mapping[str, Any]) -> TrackioPage | None:
    """The page with the scrubbed config `written`; None where none is wanted, or after a
    warning."""
    if not config.tracking.trackio:
        return None
    for name in PLACES:
        if os.environ.pop(name, ""):
            warn(f"trackio: {name} is not heeded; a place to send to is tracking.trackio_space")
    os.environ["TRACKIO_DIR"] = str(run_dir.resolve() / "trackio")  # read at import
    for file in (run_dir / "trackio").rglob("*.db*"):
        unshare(file)
    pages: list[TrackioPage] = []

    def begin() -> None:
        trackio = import_module("trackio")
        run = trackio.init(
            project=config.run_name,
            name=config.run_name,
            config=dict(written),
            resume="allow",
            space_id=config.tracking.trackio_space or None,
            private=True,
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        pages.append(TrackioPage(trackio, run))

    # A Space may not answer.
    is_open = tried("trackio", "start", lambda: call_within(begin, START_TIMEOUT_S))
    return pages[0] if is_open else None
