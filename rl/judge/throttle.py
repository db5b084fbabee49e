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

FIRST_LINE_S = 10.0
"""Of waiting, past or ahead; the next line comes after twice as long."""
LATER_LINE_S = 60.0
"""The same once it has been said: a quota by the minute makes every iteration wait a little."""

log = logging.getLogger(__name__)


@dataclass
class Turn:
    """How often the judge wanted a question later, and since when (`time.monotonic`)."""

    num_refused: int = 0
    refused_since_s: float = 0.0


class Throttle:
    """Of all places of one judge."""

    def __init__(self, config: JudgeConfig) -> None:
        self._config = config
        self._num_open = 0
        self._num_waiting = 0
        self._began_s, self._num_answered = 0.0, 0
        """When the first of those that wait was refused, and answers since then."""
        self._nothing_since_s: float | None = None
        """The first refusal since the last answer."""
        self._next_line_s = FIRST_LINE_S
        self._said = self._said_given_up = False

    @contextmanager
    def turn(self) -> Iterator[Turn]:
        """Around a question, from before it waits for a slot until it is answered or given up."""
        turn = Turn()
        self._num_open += 1
        try:
            yield turn
        finally:
            self._num_open -= 1
            self._num_waiting -= bool(turn.num_refused)
            if turn.num_refused and not self._num_waiting:
                self._over()

    def answered(self) -> None:
        """The judge has answered something else, to whomever."""
        self._num_answered += 1
        self._nothing_since_s = None
        self._said_given_up = False

    def refused(self, turn: Turn, pause_s: float, detail: str) -> float | None:
        """Seconds that the question waits now, of the `pause_s` that it would; None: it is given
        up. `detail`: the answer, as it is shown."""
        now_s = time.monotonic()
        if not turn.num_refused:
            turn.refused_since_s = now_s
            if not self._num_waiting:
                self._began_s, self._num_answered = now_s, 0
            self._num_waiting += 1
        turn.num_refused += 1
        if self._nothing_since_s is None:
            self._nothing_since_s = now_s
        since_s = min(turn.refused_since_s, self._nothing_since_s)
        left_s = self._config.max_outage_s - (now_s - since_s)
        if left_s <= 0:
            if not self._said_given_up:
                self._said_given_up = True
                self._say(detail, "those that have waited so long are given up, and go ungraded")
            return None
        pause_s = min(pause_s, left_s)
        ahead_s = now_s + pause_s - self._began_s
        if ahead_s >= self._next_line_s:
            self._said = True
            self._next_line_s = 2 * ahead_s
            self._say(detail, f"next try in {pause_s:.0f} s, {self._estimate(now_s, left_s)}")
        return pause_s

    def _estimate(self, now_s: float, left_s: float) -> str:
        if not self._num_answered:
            return f"given up in {left_s:.0f} s"
        rest_s = self._num_open * (now_s - self._began_s) / self._num_answered
        return f"all answered in about {rest_s:.0f} s at this rate"

    def _say(self, detail: str, what_next: str) -> None:
        log.warning(
            "the judge asks to wait (%s): open questions: %d, refused: %d, answered in "
            "%.0f s: %d; %s (judge.max_outage_s=%g). Remedy: fewer at once "
            "(judge.max_concurrency=%d, on each rank), or a higher quota",
            *(detail, self._num_open, self._num_waiting),
            *(time.monotonic() - self._began_s, self._num_answered, what_next),
            *(self._config.max_outage_s, self._config.max_concurrency),
        )

    def _over(self) -> None:
        """Nobody waits any more."""
        if self._said and self._nothing_since_s is None:
            waited_s = time.monotonic() - self._began_s
            log.warning("the judge takes questions again, after %.0f s", waited_s)
        self._next_line_s = LATER_LINE_S if self._said else self._next_line_s
        self._said = False
