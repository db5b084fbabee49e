"""Leaving together: what stops one rank stops all of them, at the same line."""

from __future__ import annotations

from rl.judge.client import JudgeError
from rl.ranks import signals
from rl.ranks.dist import Dist


class Interrupted(Exception):  # noqa: N818 (reads as what happened)
    """Asked to stop while pictures were made or graded: these completions have no episodes."""


def refuse_together(refusal: JudgeError | None, dist: Dist) -> None:
    """Raise `JudgeError` on every rank once any rank's judge has refused. Collective."""
    refusals = [text for text in dist.gather(str(refusal or "")) if text]
    if refusals:
        raise JudgeError(refusals[0])


def leave_together(trouble: Interrupted | JudgeError | None, dist: Dist) -> None:
    """Return on every rank, or raise on every rank: a rank that left alone would hang the others in
    their next collective. Collective.

    `trouble`: what this rank has met, if anything. Raises `JudgeError` once any rank's judge has
    refused, else `Interrupted` once any rank was asked to stop.
    """
    refuse_together(trouble if isinstance(trouble, JudgeError) else None, dist)
    if signals.stop_requested(dist):
        raise Interrupted
    assert trouble is None, "interrupted without a signal"
