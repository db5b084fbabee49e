"""The order of prompts has exact shares and full passes, and is the same on any ranks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection
from dataclasses import replace

import pytest

from rl.api.types import Sample, UnusableSampleError
from rl.data.rows import BadRowError
from rl.rollout.episodes import PromptOrder, first_samples, usable


class Numbers:
    """A source of samples `name:0`, `name:1`, ... in which the rows `bad` cannot be read."""

    def __init__(self, name: str, length: int, bad: Collection[int] = ()) -> None:
        self.name, self.length, self.bad = name, length, bad

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Sample:
        if index in self.bad:
            raise BadRowError(f"{self.name}, row {index}: corrupt")
        return Sample(id=f"{self.name}:{index}", instruction="x")


def ids(sampler: PromptOrder, iteration: int, rank: int = 0, world_size: int = 1) -> list[str]:
    return sampler.shard(iteration, rank, world_size, lambda sample: sample.id)


def run(sampler: PromptOrder, iterations: range) -> list[str]:
    return [identity for iteration in iterations for identity in ids(sampler, iteration)]


def order(
    prompts: int, bad: Collection[int] = (), on_bad_row: str = "error", length: int = 12
) -> PromptOrder:
    """Of one source."""
    return PromptOrder([Numbers("a", length, bad)], [1], 0, prompts, on_bad_row)


def mixture(seed: int = 0) -> PromptOrder:
    return PromptOrder([Numbers("a", 7), Numbers("b", 50), Numbers("c", 5)], [2, 3, 1], seed, 12)


def test_every_pass_draws_every_row_once_in_another_order():
    sampler = order(8, length=24)
    passes = [run(sampler, range(3 * epoch, 3 * epoch + 3)) for epoch in range(4)]
    for rows in passes:
        assert sorted(rows) == sorted(f"a:{index}" for index in range(24))
    assert len({frozenset(rows[:8]) for rows in passes}) == 4, "iterations have other rows"
    drawn = run(order(5, length=7), range(7))
    assert set(Counter(drawn).values()) == {5}, "a pass may end within an iteration"
    assert run(mixture(seed=0), range(3)) != run(mixture(seed=1), range(3))


@pytest.mark.parametrize("weights", [[1, 1], [0.7, 0.3], [2, 3, 1], [1, 1, 1, 10], [1e-3, 1]])
def test_shares_are_exact_at_every_iteration(weights):
    sources = [Numbers(str(index), 10 + index) for index in range(len(weights))]
    sampler = PromptOrder(sources, weights, 0, 5)
    counts: Counter[int] = Counter()
    for iteration in range(400):
        counts.update(source for source, _ in sampler.draws(iteration))
        for source, weight in enumerate(weights):
            share = 5 * (iteration + 1) * weight / sum(weights)
            assert abs(counts[source] - share) < 1


def test_every_source_of_a_mixture_is_drawn_in_full_passes():
    drawn = Counter(run(mixture(), range(50)))  # 600 prompts: 200 a, 300 b, 100 c
    assert {drawn[f"b:{index}"] for index in range(50)} == {6}
    assert {drawn[f"c:{index}"] for index in range(5)} == {20}
    assert {drawn[f"a:{index}"] for index in range(7)} == {28, 29}


def test_the_order_continues_after_a_resume():
    uninterrupted = [ids(mixture(), iteration) for iteration in range(30)]
    for start in (0, 1, 13, 29):
        sampler = mixture()
        assert [ids(sampler, iteration) for iteration in range(start, 30)] == uninterrupted[start:]
    assert [ids(sampler, iteration) for iteration in reversed(range(30))] == uninterrupted[::-1]


@pytest.mark.parametrize("world_size", [2, 3, 4, 12])
def test_ranks_split_the_same_prompts(world_size):
    for iteration in (0, 7):
        shards = [ids(mixture(), iteration, rank, world_size) for rank in range(world_size)]
        assert [identity for shard in shards for identity in shard] == ids(mixture(), iteration)
        assert {len(shard) for shard in shards} == {12 // world_size}


def test_no_rank_always_gets_the_same_source():
    sampler = PromptOrder([Numbers("a", 9), Numbers("b", 9)], [1, 1], 0, 2)
    assert {ids(sampler, iteration, 0, 2)[0][0] for iteration in range(20)} == {"a", "b"}


def test_a_bad_row_is_replaced_by_the_next_one():
    with_bad_rows = order(12, {2, 3}, "skip")
    drawn = ids(with_bad_rows, 0)
    assert with_bad_rows.num_replaced == 2
    assert not {"a:2", "a:3"} & set(drawn) and len(drawn) == 12
    kept = [old for old, new in zip(ids(order(12), 0), drawn, strict=True) if old == new]
    assert len(kept) == 10
    ranks = [ids(order(12, {2, 3}, "skip"), 0, rank, 2) for rank in range(2)]
    assert ranks[0] + ranks[1] == drawn
    with pytest.raises(BadRowError, match="a, row"):
        ids(order(12, {2, 3}), 0)
    with pytest.raises(UnusableSampleError, match="none of its 2 rows can be used"):
        ids(order(1, {0, 1}, "skip", length=2), 0)
    sources = [Numbers("a", 3, {1})]
    assert [sample.id for sample in first_samples(sources, 9, "skip")] == ["a:0", "a:2"]
    with pytest.raises(BadRowError):
        first_samples(sources, 3)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"id": 7}, "id 7 (int); expected str"),
        ({"instruction": None}, "instruction None (NoneType); expected str"),
        ({"sources": ["a.png"]}, "sources ['a.png'] (list); expected tuple"),
        ({"sources": ("a.png",)}, "sources ('a.png',) (tuple); expected pictures"),
        ({"target": "a.png"}, "target 'a.png' (str); expected PIL.Image.Image | None"),
        ({"hidden": None}, "hidden None (NoneType); expected Mapping"),
        (None, "is None (NoneType); expected rl.api.types.Sample"),
    ],
)
def test_a_row_of_a_wrong_type_names_source_row_and_field(changes, part: str) -> None:
    row = changes and replace(Sample("a", "x"), **changes)
    for read, kind in (
        (lambda rows: ids(PromptOrder([rows], [1], 0, 1), 0), "train"),
        (lambda rows: first_samples([rows], 1), "validation"),
    ):
        with pytest.raises(ValueError, match=f"^data.{kind}.0: row 0 .*{re.escape(part)}"):
            read([row])


def build_short_prompt(sample: Sample) -> str:
    """A prompt builder that refuses rows 4 and 5 as too long."""
    if sample.id in ("a:4", "a:5"):
        raise UnusableSampleError(f"the prompt of sample {sample.id!r} has 9999 tokens")
    return sample.id


def test_a_row_without_a_usable_prompt_is_replaced():
    sampler = order(12, on_bad_row="skip")
    assert not {"a:4", "a:5"} & set(sampler.shard(0, 0, 1, build_short_prompt))
    assert sampler.num_replaced == 2
    with pytest.raises(UnusableSampleError, match=r"'a:[45]' has 9999 tokens"):
        order(12).shard(0, 0, 1, build_short_prompt)
    held_out = first_samples([Numbers("a", 12)], 12)
    assert len(usable(held_out, build_short_prompt, "skip")) == 10
    with pytest.raises(UnusableSampleError, match="'a:4' has 9999"):
        usable(held_out, build_short_prompt, "error")


def test_held_out_samples_are_the_first_rows_in_order_without_repeats():
    chosen = [sample.id for sample in first_samples([Numbers("a", 2), Numbers("b", 50)], 9)]
    by_source = sorted(chosen, key=lambda identity: identity[0])
    assert by_source == ["a:0", "a:1", "b:0", "b:1", "b:2", "b:3"]
    assert len(first_samples([Numbers("a", 3)], 64)) == 3
