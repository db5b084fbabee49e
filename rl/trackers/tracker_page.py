"""A run's page at wandb or trackio, and functions that catch a tracker's failures."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from PIL.Image import Image

from rl.console.console import warn
from rl.text.scrub import scrub

FINISH_TIMEOUT_S = 60.0
MAX_CELL_CHARS = 600
MAIN_METRICS = {
    "eval/reward": "held_out_reward",
    "eval/gain_over_stock": "gain_over_untrained",
    "reward/mean": "training_reward",
    "kl/reference_k3": "kl",
    "policy/entropy": "entropy",
    "groups/zero_spread": "groups_without_spread",
}
"""The six most important metrics, in order, with short names: shown first, at trackers and on the
run's page."""
MAIN = "0_main/"
"""Trackers sort sections by name."""
Cell = str | float | Image | None


class Table(NamedTuple):
    name: str
    iteration: int
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    """Texts, numbers and pictures, with secrets (API keys) removed."""


class BeforeAfter(NamedTuple):
    """A held-out evaluation compared with that before training."""

    iteration: int
    pictures: Sequence[tuple[str, Image]]
    """(caption, source, before and after side by side), without secrets."""
    summary: Mapping[str, float | str]
    """What was learnt, by the name of the summary's entry."""


@dataclass
class ServicePage:
    """A run's page at wandb, or at trackio, which has the same API. A table is logged together with
    the metrics of its iteration. If a method raises any exception, the caller drops the page."""

    name: str
    module: Any
    write: Callable[[Mapping[str, Any], int], object]
    """Logs a row: (values by name, iteration)."""
    finish: Callable[[bool], object]
    """Ends the page; the argument: whether the run failed. May block indefinitely."""
    escape: Callable[[str], str] = str
    """Converts a text for a table's cell."""
    first_iteration: int = 0
    """First iteration to log; a resumed run repeats iterations that the page already has."""
    summarize: Callable[[Mapping[str, Any]], object] | None = None
    """Sets entries of the run's summary; None: the service has none."""
    _tables: dict[str, Any] = field(default_factory=dict)

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        tables, self._tables = self._tables, {}
        if iteration >= self.first_iteration:
            self.write({**metrics, **tables}, iteration)

    def log_table(self, table: Table) -> None:
        rows = [list(map(self._cell, row)) for row in table.rows]
        self._tables[table.name] = self.module.Table(columns=list(table.columns), data=rows)

    def log_before_after(self, compared: BeforeAfter) -> None:
        """Does nothing at a service without a summary, which has no panel of pictures either."""
        if self.summarize is not None:
            images = [self.module.Image(image, caption=text) for text, image in compared.pictures]
            self._tables |= {f"{MAIN}before_after": images} if images else {}
            self.summarize(compared.summary)

    def close(self, failed: bool) -> None:
        """Finish the page; waits at most `FINISH_TIMEOUT_S`."""
        call_within(lambda: self.finish(failed), FINISH_TIMEOUT_S)

    def _cell(self, cell: Cell) -> Any:
        if isinstance(cell, Image):
            return self.module.Image(cell)
        return self.escape(cell) if isinstance(cell, str) else cell


def with_main(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics, before them the main ones under their short names."""
    main = {f"{MAIN}{short}": metrics[n] for n, short in MAIN_METRICS.items() if n in metrics}
    return {**main, **metrics}


def tried(name: str, action: str, call: Callable[[], object]) -> bool:
    """Run `call`; log a warning if it raises. Returns whether it succeeded."""
    try:
        call()
    except Exception as error:  # a tracker may fail in any way
        warn(scrub(f"{name} {action} failed, the run goes on: {error!r}"))
        return False
    return True


def call_within(call: Callable[[], object], seconds: float) -> None:
    """Run `call` in a daemon thread, which is abandoned after `seconds` (a DNS look-up has no
    timeout). Raises the exception of `call`, or TimeoutError."""
    outcome: list[Exception | None] = [TimeoutError(f"no answer in {seconds:g} s")]

    def run() -> None:
        try:
            call()
            outcome[0] = None
        except Exception as error:
            outcome[0] = error

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if outcome[0] is not None:
        raise outcome[0]
