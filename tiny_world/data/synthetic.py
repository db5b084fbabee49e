"""Data made on the spot from a seed: what the synthetic plugins share."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from typing import Annotated, ClassVar, TypeVar

from pydantic import Field

from rl.api.data import DataSource
from rl.api.plugin import PluginConfig
from rl.api.types import Sample


class MadeConfig(PluginConfig):
    """A finite set; another seed gives another one."""

    num_samples: Annotated[int, Field(ge=1, le=10_000_000)] = 4096
    """Samples in the set."""
    seed: int = 0
    """Which set, or its order."""
    held_out: bool = False
    """True: samples that share nothing with any set where it is false, whatever the seeds."""


MadeConfigT = TypeVar("MadeConfigT", bound=MadeConfig)
MadeT = TypeVar("MadeT")

HELD_OUT_SHARE = 8
"""One picture or text in so many is held out."""


def is_held_out(picture: bytes) -> bool:
    """Of which half a picture is; its bytes alone say so."""
    digest = hashlib.blake2b(picture, digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_SHARE == 0


class MadeSource(DataSource[MadeConfigT]):
    """Sample i depends on the config and i alone."""

    name: ClassVar[str]
    """What ids begin with."""
    carries: ClassVar[frozenset[str]]
    """Beyond an instruction, in the words of a reward's `needs`."""

    def __len__(self) -> int:
        return self.config.num_samples

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.make(index)

    def make(self, index: int) -> Sample:
        """Sample `index`, which is one of the set."""
        raise NotImplementedError

    def id_of(self, index: int) -> str:
        """Of sample `index`; no two sets of this plugin share one."""
        half = "held-out" if self.config.held_out else "train"
        return f"{self.name}-{half}-{self.config.seed}-{index}"

    def draw(self, index: int, made: Callable[[random.Random], tuple[MadeT, bytes]]) -> MadeT:
        """The first thing made for `index` whose picture or text, whose bytes come beside it, is of
        the wanted half: those bytes alone say of which half it is."""
        rng = random.Random(f"{self.config.seed}:{index}")
        while True:
            found, shown = made(rng)
            if is_held_out(shown) == self.config.held_out:
                return found

    @classmethod
    def count(cls, config: MadeConfigT) -> int | None:
        """Samples in the set."""
        return config.num_samples

    @classmethod
    def provides(cls, config: MadeConfigT) -> frozenset[str]:
        """What samples carry."""
        return cls.carries
