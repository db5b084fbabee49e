"""What a sample shows, to find samples that share a source picture."""

from __future__ import annotations

from hashlib import blake2b

from rl.api.types import Sample


def shown(sample: Sample) -> tuple[str, ...]:
    """A hash of each source picture; of a sample without any, of its words, in any letter case."""
    if sample.source_codes is not None:
        contents = [repr(sample.source_codes.tolist()).encode()]
    elif sample.sources:
        contents = [repr(p.size).encode() + p.tobytes() for p in sample.sources]
    else:
        contents = [" ".join(sample.instruction.casefold().split()).encode()]
    return tuple(blake2b(content, digest_size=16).hexdigest() for content in contents)
