"""Stops all ranks at the same line of code when any of them is asked to stop."""

from __future__ import annotations

from rl.ranks import signals
from rl.ranks.dist import Dist


class Interrupted(Exception):  # noqa: N818 (reads as what happened)
    """Asked to stop while pictures were made or graded: these completions have no episodes."""


def leave_together(dist: Dist) -> None:
    """Raise `Interrupted` on every rank once any was asked to stop, else return on every rank: if
    one rank left alone, the others would hang in their next collective. Collective."""
    if signals.stop_requested(dist):
        raise Interrupted
