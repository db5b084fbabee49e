"""What a run watches over many iterations and says once, when it begins.

What: groups that fail as a whole, training prompts that are held-out ones. What not: numbers of one
iteration (`episode_metrics.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from statistics import fmean

from rl.api.types import Sample

DEAD_SHARE = 0.25
"""Of the groups: above it the run says so."""
DEAD_WINDOW = 10
"""Iterations that the share is averaged over: one is a handful of groups."""


class DeadGroups:
    """`groups/dead` over the last iterations. Says so once, and again after it was better."""

    def __init__(self) -> None:
        self._shares: deque[float] = deque(maxlen=DEAD_WINDOW)
        self._said = False

    def add(self, share: float) -> str | None:
        """A sentence when the mean over a full window has just risen above `DEAD_SHARE`."""
        self._shares.append(share)
        full = len(self._shares) == DEAD_WINDOW
        is_high = full and fmean(self._shares) > DEAD_SHARE
        begins, self._said = is_high and not self._said, is_high
        if not begins:
            return None
        return (
            f"{fmean(self._shares):.0%} of the groups of the last {DEAD_WINDOW} iterations failed "
            "as a whole: their completions all earn the same, below 0.5, and the policy gradient "
            "learns nothing from them (groups/dead)"
        )


class HeldOutContents:
    """What the held-out samples show, to find it again among training prompts."""

    def __init__(self, held_out: Sequence[Sample]) -> None:
        """Their pictures are read once, here."""
        self._ids = {_content(sample): sample.id for sample in held_out}

    def shared(self, training: Iterable[Sample]) -> dict[str, str]:
        """Ids of the training samples that show what a held-out one shows -> that one's id."""
        found = ((sample.id, self._ids.get(_content(sample))) for sample in training)
        return {seen: held_out for seen, held_out in found if held_out is not None}


def _content(sample: Sample) -> bytes:
    """A hash of the source pictures; of a sample without one, of its words."""
    digest = blake2b(digest_size=16)
    if sample.source_codes is not None:
        digest.update(repr(sample.source_codes.tolist()).encode())
    elif sample.sources:
        for picture in sample.sources:
            digest.update(repr(picture.size).encode() + picture.tobytes())
    else:
        digest.update(sample.instruction.encode())
    return digest.digest()
