"""Leaving together: when one rank is asked to stop, all of them leave at the same line."""

from __future__ import annotations

from rl.ranks import signals
from rl.ranks.dist import Dist


class Interrupted(Exception):  # noqa: N818 (reads as what happened)
    """Asked to stop while pictures were made or graded: these completions have no episodes."""


def leave_together(dist: Dist) -> None:
    """Raise `Interrupted` on every rank once any was asked to stop, else return on every rank: one
    that left alone would hang the others in their next collective. Collective."""
    if signals.stop_requested(dist):
        raise Interrupted
