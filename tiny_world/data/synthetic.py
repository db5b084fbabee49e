"""Data made on the spot from a seed: what the synthetic plugs share.

What: the config of a finite set, a `DataSource` but for its samples, `count` and `check`. What not:
samples, which each plug makes. Called by the plugs beside it.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

from pydantic import Field

from rl.api.data import DataSource
from rl.api.types import Sample
from rl.config.schema import Section


class MadeConfig(Section):
    """A finite set; another seed gives another one, e.g. held-out samples."""

    type: str
    """This plug's dotted path."""
    num_samples: Annotated[int, Field(ge=1)] = 4096
    """Samples in the set."""
    seed: int = 0
    """Which set, or its order."""


ConfigT = TypeVar("ConfigT", bound=MadeConfig)


class MadeSource(DataSource[ConfigT]):
    """Sample i depends on the config and i alone."""

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
    def count(cls, config: ConfigT) -> int | None:
        """Samples in the set."""
        return config.num_samples
