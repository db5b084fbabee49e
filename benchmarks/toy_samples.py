"""Data plug of the benchmark's runs: the rows of `toy.make_sample`.

What: a finite `DataSource`. What not: the rows themselves. Named in a config by its dotted path.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from rl.api.types import Sample
from tiny_world.data.synthetic import MadeConfig, MadeSource
from tiny_world.data.synthetic import check as check
from tiny_world.data.synthetic import count as count


class Config(MadeConfig):
    """Rows of one shape."""

    shape: dict[str, Any] = Field(default_factory=dict)
    """Fields of `toy.Shape`."""


class ToySamples(MadeSource[Config]):
    """Row i depends on the shape and i alone."""

    def make(self, index: int) -> Sample:
        from benchmarks.toy import Shape, make_sample

        return make_sample(index, Shape(**self.config.shape))


def provides(config: Config) -> frozenset[str]:
    """What samples carry, in the words of a reward's `NEEDS`."""
    return frozenset({"source"})


def build(
    config: Config, on_bad_row: Literal["error", "skip"], max_image_side_px: int
) -> ToySamples:
    """The rows as a `DataSource`."""
    return ToySamples(config)
