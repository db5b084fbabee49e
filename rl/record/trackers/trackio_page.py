"""trackio's files in `<run>/trackio`, or a Space of the hub that the config names.

Guards against trackio's own ways: variables of the environment would send a run's data elsewhere;
it measures the machine; and it would show an iteration that is done again twice.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from rl.config.schema import RunConfig
from rl.files.private import unshare
from rl.record.console import warn
from rl.record.markdown import text
from rl.record.trackers.page import Cell, Page, call_within, is_picture, tried

PLACES = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_WEBHOOK_URL", "TRACKIO_BUCKET_ID")
"""Variables by which trackio finds somebody to send to."""
START_TIMEOUT_S, FINISH_TIMEOUT_S = 120.0, 60.0
MAX_CELL_CHARS = 600


class TrackioPage(Page):
    """See the module."""

    name = "trackio"

    def __init__(self, trackio: Any, run: Any) -> None:
        """`trackio`: the module; `run`: its run."""
        self._trackio, self._run = trackio, run
        self._first_step: int = run._next_step
        """What the page of a resumed run does not hold yet."""
        self._waiting: dict[str, Any] = {}
        """Tables that go along with the iteration's metrics: as one row, it is there or not."""
        self._last_iteration = 0

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        waiting, self._waiting = self._waiting, {}
        self._last_iteration = iteration
        if iteration >= self._first_step:
            self._run.log({**metrics, **waiting}, step=iteration)

    def log_table(
        self,
        name: str,
        iteration: int | None,
        columns: Sequence[str],
        rows: Sequence[Sequence[Cell]],
    ) -> None:
        cells = [[self._cell(cell) for cell in row] for row in rows]
        table = self._trackio.Table(columns=list(columns), data=cells)
        if iteration is None:
            self._run.log({name: table}, step=self._last_iteration)
        else:
            self._waiting[name] = table

    def close(self, failed: bool) -> None:
        _within(self._run.finish, FINISH_TIMEOUT_S)

    def _cell(self, cell: Cell) -> Any:
        """Its words are read as Markdown."""
        if is_picture(cell):
            return self._trackio.Image(cell)
        return text(cell, MAX_CELL_CHARS) if isinstance(cell, str) else cell


def open_page(run_dir: Path, config: RunConfig, written: Mapping[str, Any]) -> TrackioPage | None:
    """The page of a run whose config, as it may be written, is `written`; None where none is wanted
    or none can be had, which is said."""
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
        pages.append(_begin(config, written))

    is_open = tried("trackio", "start", partial(_within, begin, START_TIMEOUT_S))
    return pages[0] if is_open else None


def _begin(config: RunConfig, written: Mapping[str, Any]) -> TrackioPage:
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
    return TrackioPage(trackio, run)


def _within(call: Callable[[], object], seconds: float) -> None:
    """A Space may not answer. Raises TimeoutError."""
    problem = call_within(call, seconds)
    if problem is not None:
        raise TimeoutError(problem)
