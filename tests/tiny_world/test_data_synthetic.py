"""Every data plugin of the tiny world: a sample is a function of its config and index."""

from __future__ import annotations

from typing import Any

import pytest

from rl.api.data import RowRules
from rl.api.types import Sample
from rl.run.contents import shown as contents
from tiny_world.data.shape_pairs import ShapePairs
from tiny_world.data.shape_prompts import ShapePrompts
from tiny_world.data.shape_questions import ShapeQuestions
from tiny_world.data.shape_riddles import ShapeRiddles
from tiny_world.data.shape_tokens import ShapeTokens
from tiny_world.data.shapes import Shapes
from tiny_world.data.synthetic import MadeSource

Source = type[MadeSource[Any]]
ALL = pytest.mark.parametrize(
    "source", [Shapes, ShapePairs, ShapeTokens, ShapeQuestions, ShapePrompts, ShapeRiddles]
)


def made(source: Source, num_samples: int = 50, **more: Any) -> MadeSource[Any]:
    config = source.Config.model_validate({"num_samples": num_samples, **more})
    assert list(source.problems(config, RowRules())) == []
    assert source.count(config) == num_samples
    return source(config, RowRules())


def shown(sample: Sample) -> tuple[object, ...]:
    pictures = [None if p is None else p.tobytes() for p in (*sample.sources, sample.target)]
    codes = [None if c is None else c.tobytes() for c in (sample.source_codes, sample.target_codes)]
    return (sample.instruction, sample.category, sample.reference, *pictures, *codes)


@ALL
def test_a_sample_depends_on_seed_and_index_alone(source: Source) -> None:
    one, shorter = made(source), made(source, num_samples=8)
    assert (len(one), len(shorter)) == (50, 8)
    backwards = {index: one[index] for index in reversed(range(8))}
    for index in range(8):
        assert shorter[index].id == backwards[index].id
        assert shown(shorter[index]) == shown(backwards[index])
    assert len({one[index].id for index in range(50)}) == 50
    with pytest.raises(IndexError):
        shorter[8]


@ALL
def test_another_seed_gives_another_set(source: Source) -> None:
    one, other = ([made(source, seed=seed)[i] for i in range(50)] for seed in (1, 2))
    assert [shown(sample) for sample in one] != [shown(sample) for sample in other]
    assert not {sample.id for sample in one} & {sample.id for sample in other}
    if source is not ShapePrompts:  # whose prompts are the same ones in another order
        assert not set(map(shown, one)) & set(map(shown, other))


@ALL
def test_held_out_samples_share_nothing_with_training_ones_whatever_the_seeds(
    source: Source,
) -> None:
    """By what they show: a centred scene of two shapes is one of a few thousand."""
    sets = [
        made(source, 200, seed=seed, held_out=held_out)
        for seed, held_out in ((1, False), (1, True), (2, True))
    ]
    training, *held_out = ([found[i] for i in range(200)] for found in sets)
    for other in held_out:
        ours, theirs = ({name for s in some for name in contents(s)} for some in (training, other))
        assert not ours & theirs
        assert not {sample.id for sample in training} & {sample.id for sample in other}


@ALL
def test_samples_carry_what_their_source_says(source: Source) -> None:
    sample, provided = made(source)[0], source.provides(made(source).config)
    assert ("reference" in provided) == (sample.reference is not None)
    assert ("target_codes" in provided) == (sample.target_codes is not None)
    assert ("hidden:answer" in provided) == ("answer" in sample.hidden)
    if "source_codes" not in provided:
        assert ("source" in provided) == (sample.source is not None)


def test_target_and_reference_fulfil_the_instruction() -> None:
    kinds = set()
    for index in range(50):
        sample = made(Shapes)[index]
        assert sample.source.tobytes() != sample.target.tobytes()
        is_erased = sample.category == "erase"
        assert sample.reference.startswith("remove the" if is_erased else "turn the")
        kinds.add(sample.category)
    assert kinds == {"noun", "match", "erase"}


def test_tokens_differ_in_the_four_codes_of_the_shape() -> None:
    sample = made(ShapeTokens)[0]
    assert sample.sources == () and sample.target is None
    assert (sample.source_codes != sample.target_codes).sum() == 4
