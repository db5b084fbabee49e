"""Samples of every data plugin of the tiny world depend only on config and index."""

from __future__ import annotations

from typing import Any

import pytest

from rl.api.data import RowRules
from rl.api.types import Sample
from rl.run.checks import contents_of
from tiny_world.data.shape_pairs import ShapePairs
from tiny_world.data.shape_prompts import ShapePrompts
from tiny_world.data.shape_questions import ShapeQuestions
from tiny_world.data.shape_riddles import ShapeRiddles
from tiny_world.data.shape_tokens import ShapeTokens
from tiny_world.data.shapes import Shapes
from tiny_world.data.synthetic import SyntheticSource

Source = type[SyntheticSource[Any]]
ALL = pytest.mark.parametrize(
    "source", [Shapes, ShapePairs, ShapeTokens, ShapeQuestions, ShapePrompts, ShapeRiddles]
)


def samples_of(source: Source, num: int = 50, **keys: Any) -> list[Sample]:
    made = source(source.Config.model_validate({"num_samples": num, **keys}), RowRules())
    assert len(made) == num
    samples = [made[index] for index in reversed(range(num))]
    with pytest.raises(IndexError):
        made[num]
    return samples[::-1]


def fields_of(sample: Sample) -> tuple[object, ...]:
    pictures = [None if p is None else p.tobytes() for p in (*sample.sources, sample.target)]
    codes = [None if c is None else c.tobytes() for c in (sample.source_codes, sample.target_codes)]
    return (sample.instruction, sample.category, sample.reference, *pictures, *codes)


@ALL
def test_a_sample_depends_on_seed_and_index_alone(source: Source) -> None:
    many, few = samples_of(source), samples_of(source, num=8)
    assert [(s.id, fields_of(s)) for s in few] == [(s.id, fields_of(s)) for s in many[:8]]
    assert len({sample.id for sample in many}) == 50


@ALL
def test_another_seed_gives_another_set(source: Source) -> None:
    one, other = (samples_of(source, seed=seed) for seed in (1, 2))
    assert [fields_of(sample) for sample in one] != [fields_of(sample) for sample in other]
    assert not {sample.id for sample in one} & {sample.id for sample in other}
    if source is not ShapePrompts:  # another seed only reorders its prompts
        assert not set(map(fields_of, one)) & set(map(fields_of, other))


@pytest.mark.slow
@ALL
@pytest.mark.parametrize("seed", [1, 2])
def test_held_out_samples_share_no_contents_with_training_ones_whatever_the_seeds(
    source: Source, seed: int
) -> None:
    """Contents are compared: there are only a few thousand centred scenes of two shapes."""
    sets = samples_of(source, 200, seed=1), samples_of(source, 200, seed=seed, held_out=True)
    training, held_out = ({c for s in samples for c in contents_of(s)} for samples in sets)
    assert not training & held_out
    assert not {s.id for s in sets[0]} & {s.id for s in sets[1]}


@ALL
def test_samples_have_the_fields_that_their_source_declares(source: Source) -> None:
    [sample], provided = samples_of(source, 1), source.provides(source.Config())
    assert ("reference" in provided) == (sample.reference is not None)
    assert ("target_codes" in provided) == (sample.target_codes is not None)
    assert ("hidden:answer" in provided) == ("answer" in sample.hidden)
    if "source_codes" not in provided:
        assert ("source" in provided) == (sample.source is not None)


def test_target_and_reference_fulfil_the_instruction() -> None:
    samples = samples_of(Shapes)
    for sample in samples:
        assert sample.source.tobytes() != sample.target.tobytes()
        verb = "remove the" if sample.category == "erase" else "turn the"
        assert sample.reference.startswith(verb)
    assert {sample.category for sample in samples} == {"noun", "match", "erase"}


def test_source_and_target_codes_differ_in_the_four_codes_of_the_shape() -> None:
    [sample] = samples_of(ShapeTokens, 1)
    assert sample.sources == () and sample.target is None
    assert (sample.source_codes != sample.target_codes).sum() == 4
