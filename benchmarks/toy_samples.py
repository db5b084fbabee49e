"""Data plug of the benchmark's runs: the rows of `toy.make_sample`.

What: a finite `DataSource`. What not: the rows themselves. Named in a config by its dotted path.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from rl.api.types import Sample
from tiny_world.data.synthetic import MadeConfig, MadeSource


class Config(MadeConfig):
    """Rows of one shape."""

    shape: dict[str, Any] = Field(default_factory=dict)
    """Fields of `toy.Shape`."""


class ToySamples(MadeSource[Config]):
    """Row i depends on the shape and i alone."""

    def make(self, index: int) -> Sample:
        from benchmarks.toy import Shape, make_sample

        return make_sample(index, Shape(**self.config.shape))

    @classmethod
    def provides(cls, config: Config) -> frozenset[str]:
        """What samples carry, in the words of a reward's `needs`."""
        return frozenset({"source"})
