"""Data made on the spot from a seed: what the synthetic plugs share."""

from __future__ import annotations

from typing import Annotated, ClassVar, TypeVar

from pydantic import Field

from rl.api.data import DataSource
from rl.api.plug import PlugConfig
from rl.api.types import Sample


class MadeConfig(PlugConfig):
    """A finite set; another seed gives another one, e.g. held-out samples."""

    num_samples: Annotated[int, Field(ge=1)] = 4096
    """Samples in the set."""
    seed: int = 0
    """Which set, or its order."""


MadeConfigT = TypeVar("MadeConfigT", bound=MadeConfig)


class MadeSource(DataSource[MadeConfigT]):
    """Sample i depends on the config and i alone."""

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

    @classmethod
    def count(cls, config: MadeConfigT) -> int | None:
        """Samples in the set."""
        return config.num_samples

    @classmethod
    def provides(cls, config: MadeConfigT) -> frozenset[str]:
        """What samples carry."""
        return cls.carries
