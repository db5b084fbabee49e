"""Base classes of data plugins that generate their samples from a seed."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from typing import Annotated, ClassVar, TypeVar

from pydantic import Field

from rl.api.data import DataSource
from rl.api.plugin import PluginConfig
from rl.api.types import Sample


class SyntheticConfig(PluginConfig):
    """A finite set; another seed gives another one."""

    num_samples: Annotated[int, Field(ge=1, le=10_000_000)] = 4096
    """Samples in the set."""
    seed: int = 0
    """Selects the set, or its order."""
    held_out: bool = False
    """True: the samples share nothing with any set where it is false, whatever the seeds."""


ConfigT = TypeVar("ConfigT", bound=SyntheticConfig)
T = TypeVar("T")

HELD_OUT_SHARE = 8
"""One picture or text in so many is held out."""


def is_held_out(picture: bytes) -> bool:
    """Whether a picture (or text) is held out, which depends only on its bytes."""
    digest = hashlib.blake2b(picture, digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_SHARE == 0


class SyntheticSource(DataSource[ConfigT]):
    """Sample i depends only on the config and i."""

    name: ClassVar[str]
    """Prefix of the sample ids."""
    carries: ClassVar[frozenset[str]]
    """Fields of a sample besides the instruction, named as in a reward's `needs`."""

    def __len__(self) -> int:
        return self.config.num_samples

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.make(index)

    def make(self, index: int) -> Sample:
        """Sample `index`, which is in range."""
        raise NotImplementedError

    def id_of(self, index: int) -> str:
        """The id of sample `index`; sets of this plugin with different configs share no id."""
        half = "held-out" if self.config.held_out else "train"
        return f"{self.name}-{half}-{self.config.seed}-{index}"

    def draw(self, index: int, make_one: Callable[[random.Random], tuple[T, bytes]]) -> T:
        """Calls `make_one`, which returns a value and the bytes of its picture or text, until these
        bytes are in the configured half (held out or not)."""
        rng = random.Random(f"{self.config.seed}:{index}")
        while True:
            value, content = make_one(rng)
            if is_held_out(content) == self.config.held_out:
                return value

    @classmethod
    def provides(cls, config: ConfigT) -> frozenset[str]:
        """Fields of every sample."""
        return cls.carries
