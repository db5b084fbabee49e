"""Waits for a judge that answers and wants questions later (HTTP 429, Retry-After).

Such an answer uses up none of a question's tries. A question waits `judge.max_outage_s` at most,
and no longer once the judge has had no other answer for that long.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rl.config.schema import JudgeConfig

QUIET_S = 10.0
"""A shorter wait, past and ahead, is not logged."""
LINE_EVERY_S = 60.0

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Turn:
    """How often the judge wanted a question later, and since when (`time.monotonic`)."""

    num_refused: int = 0
    refused_since_s: float = 0.0


class Throttle:
    """The waiting questions of one judge, at all of its addresses."""

    def __init__(self, config: JudgeConfig) -> None:
        self._config = config
        self._open: list[Turn] = []
        self._num_answered = 0
        """Since a question has been waiting."""
        self._nothing_since_s: float | None = None
        """The first refusal since the last answer."""
        self._next_line_s = 0.0
        self._has_given_up = False

    @contextmanager
    def turn(self) -> Iterator[Turn]:
        """Around a question, from before it waits for a slot until it is answered or given up."""
        turn = Turn()
        self._open.append(turn)
        try:
            yield turn
        finally:
            self._open.remove(turn)

    def answered(self) -> None:
        """The judge has answered some question."""
        self._num_answered += 1
        self._nothing_since_s = None
        self._has_given_up = False

    def refused(self, turn: Turn, pause_s: float, detail: str) -> float | None:
        """Seconds that the question waits now, at most `pause_s`; None: it is given up. `detail`:
        the answer, as it is logged."""
        now_s = time.monotonic()
        waiting = [other for other in self._open if other.num_refused]
        if not waiting:
            self._num_answered = 0
        if not turn.num_refused:
            turn.refused_since_s = now_s
            waiting.append(turn)
        turn.num_refused += 1
        if self._nothing_since_s is None:
            self._nothing_since_s = now_s
        since_s = min(turn.refused_since_s, self._nothing_since_s)
        left_s = self._config.max_outage_s - (now_s - since_s)
        waited_s = now_s - min(other.refused_since_s for other in waiting)
        if left_s <= 0:
            if not self._has_given_up:
                self._has_given_up = True
                given_up = "those that have waited so long are given up, and go ungraded"
                self._log(detail, len(waiting), waited_s, given_up)
            return None
        pause_s = min(pause_s, left_s)
        if waited_s + pause_s >= QUIET_S and now_s >= self._next_line_s:
            self._next_line_s = now_s + LINE_EVERY_S
            if self._num_answered:
                rest_s = len(self._open) * waited_s / self._num_answered
                end = f"all answered in about {rest_s:.0f} s at this rate"
            else:
                end = f"given up in {left_s:.0f} s"
            self._log(detail, len(waiting), waited_s, f"next try in {pause_s:.0f} s, {end}")
        return pause_s

    def _log(self, detail: str, num_waiting: int, waited_s: float, what_next: str) -> None:
        log.warning(
            "the judge asks to wait (%s): open questions: %d, refused: %d, answered in "
            "%.0f s: %d; %s (judge.max_outage_s=%g). Remedy: fewer at once "
            "(judge.max_concurrency=%d, on each rank), or a higher quota",
            *(detail, len(self._open), num_waiting, waited_s, self._num_answered, what_next),
            *(self._config.max_outage_s, self._config.max_concurrency),
        )
