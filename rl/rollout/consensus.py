"""Stops all ranks at the same point of the program if any of them is asked to stop."""

from __future__ import annotations

from rl.ranks import signals
from rl.ranks.dist import Dist


class Interrupted(Exception):  # noqa: N818 (reads as what happened)
    """The run was asked to stop during rendering or grading; its completions have no episodes."""


def raise_if_interrupted(dist: Dist) -> None:
    """Raise `Interrupted` on every rank if any was asked to stop, else return on every rank: if one
    rank alone raised, the others would hang in their next collective. Collective."""
    if signals.stop_requested(dist):
        raise Interrupted
