"""What samples show: finds held-out pictures in training, and samples that share a picture."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b

from rl.api.types import Sample


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
