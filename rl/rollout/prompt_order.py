"""The order of prompts: a weighted mixture of data sources, as a pure function of the iteration."""

from __future__ import annotations

import functools
import random
from array import array
from collections.abc import Callable, Sequence
from typing import TypeVar

from rl.api.data import DataSource, OnBadRow, read_row
from rl.api.types import Prompt, Sample, UnusableSampleError
from rl.files import copied_pictures

T = TypeVar("T")


class PromptOrder:
    """Each draw of the run takes the next row of one source, in shuffled order. Sources take turns
    so that their shares are exact. Every epoch of a source has another order."""

    def __init__(
        self,
        sources: Sequence[DataSource],
        weights: Sequence[float],
        seed: int,
        prompts_per_iteration: int,
        on_bad_row: OnBadRow = "error",
    ) -> None:
        """`weights`: > 0, one per source; only their ratios matter."""
        assert sources and all(weight > 0 for weight in weights), weights
        self.num_replaced = 0
        """Prompts replaced because their row was unusable (of this rank, since this start)."""
        self._sources = sources
        self._seed = seed
        self._num_prompts = prompts_per_iteration
        self._on_bad_row = on_bad_row
        self._mixture = _Mixture(weights)

    def shard(
        self, iteration: int, rank: int, world_size: int, build: Callable[[Sample], T]
    ) -> list[T]:
        """Apply `build` to this rank's contiguous share of the iteration's samples.

        A row that cannot be read or made into a prompt (e.g. too long) raises UnusableSampleError,
        or under 'skip' is replaced by the next row in its source's order.
        """
        assert self._num_prompts % world_size == 0, (self._num_prompts, world_size)
        per_rank = self._num_prompts // world_size
        draws = self.draws(iteration)[rank * per_rank : (rank + 1) * per_rank]
        return [self._take(source, position, build) for source, position in draws]

    def num_distinct(self, iteration: int) -> int:
        """Number of different rows among all ranks' draws of an iteration."""
        return len(
            {(source, self._index(source, position)) for source, position in self.draws(iteration)}
        )

    def _index(self, source: int, position: int, step: int = 0) -> int:
        """The row that a draw takes, or the one `step` places later in that epoch's order."""
        num_rows = len(self._sources[source])
        epoch, start = divmod(position, num_rows)
        order = _shuffled(f"{self._seed}:{source}:{epoch}", num_rows)
        return order[(start + step) % num_rows]

    def draws(self, iteration: int) -> list[tuple[int, int]]:
        """All ranks' draws of an iteration as (source, number of earlier draws from the source)."""
        start = iteration * self._num_prompts
        draws = [self._mixture.draw(n) for n in range(start, start + self._num_prompts)]
        # The mixture repeats a pattern; unshuffled, one rank could always get the same source.
        random.Random(f"{self._seed}:slots:{iteration}").shuffle(draws)
        return draws

    def _take(self, source: int, position: int, build: Callable[[Sample], T]) -> T:
        rows = self._sources[source]
        for step in range(len(rows)):
            try:
                index = self._index(source, position, step)
                item = build(copied_pictures(read_row(rows, index, f"data.train.{source}")))
            except UnusableSampleError:
                if self._on_bad_row == "error":
                    raise
                continue
            self.num_replaced += step > 0
            return item
        raise UnusableSampleError(f"data source {source}: none of its {len(rows)} rows can be used")


def first_samples(
    sources: Sequence[DataSource],
    weights: Sequence[float],
    num_samples: int,
    on_bad_row: OnBadRow = "error",
) -> list[Sample]:
    """The first `num_samples` of a mixture, each source in its own order, no row twice.

    Returns fewer if a source runs out (the others do not replace its share) or if rows cannot be
    read (with 'skip'). Raises ValueError if two samples have the same id.
    """
    mixture = _Mixture(weights)
    samples: list[Sample] = []
    row_of_id: dict[str, str] = {}
    for source, index in map(mixture.draw, range(num_samples)):
        if index >= len(sources[source]):
            continue
        try:
            key = f"data.validation.{source}"
            sample = copied_pictures(read_row(sources[source], index, key))
            row = f"{key}, row {index}"
            if row_of_id.setdefault(sample.id, row) != row:
                raise ValueError(
                    f"{row} has the id {sample.id!r} of {row_of_id[sample.id]}; give it another "
                    "one: held-out noise and file names are derived from it"
                )
            samples.append(sample)
        except UnusableSampleError:
            if on_bad_row == "error":
                raise
    return samples


def usable(
    samples: Sequence[Sample], build_prompt: Callable[[Sample], Prompt], on_bad_row: OnBadRow
) -> list[Sample]:
    """The samples that `build_prompt` accepts; with 'error', raises for one that it rejects."""
    accepted = []
    for sample in samples:
        try:
            build_prompt(sample)
        except UnusableSampleError:
            if on_bad_row == "error":
                raise
            continue
        accepted.append(sample)
    return accepted


class _Mixture:
    """Assigns each draw to the source that is furthest behind its share so far.

    After any number of draws every source is within one draw of its share (observed for 2 to 16
    sources). Draws are computed once, in order, and stored; a million draws take two seconds.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self._shares = [weight / sum(weights) for weight in weights]
        self._counts = [0] * len(weights)
        self._sources = array("H")
        self._positions = array("q")

    def draw(self, n: int) -> tuple[int, int]:
        """Draw n as (source, number of earlier draws from this source)."""
        while len(self._sources) <= n:
            num_after = len(self._sources) + 1
            deficits = [
                share * num_after - count
                for share, count in zip(self._shares, self._counts, strict=True)
            ]
            source = deficits.index(max(deficits))
            self._sources.append(source)
            self._positions.append(self._counts[source])
            self._counts[source] += 1
        return self._sources[n], self._positions[n]


@functools.lru_cache(maxsize=64)
def _shuffled(name: str, length: int) -> array[int]:
    order = array("q", range(length))
    random.Random(name).shuffle(order)
    return order
