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


def make_source(source: Source, num_samples: int = 50, **keys: Any) -> SyntheticSource[Any]:
    config = source.Config.model_validate({"num_samples": num_samples, **keys})
    made = source(config, RowRules())
    assert len(made) == num_samples
    return made


def fields_of(sample: Sample) -> tuple[object, ...]:
    pictures = [None if p is None else p.tobytes() for p in (*sample.sources, sample.target)]
    codes = [None if c is None else c.tobytes() for c in (sample.source_codes, sample.target_codes)]
    return (sample.instruction, sample.category, sample.reference, *pictures, *codes)


@ALL
def test_a_sample_depends_on_seed_and_index_alone(source: Source) -> None:
    one, shorter = make_source(source), make_source(source, num_samples=8)
    assert (len(one), len(shorter)) == (50, 8)
    backwards = {index: one[index] for index in reversed(range(8))}
    for index in range(8):
        assert shorter[index].id == backwards[index].id
        assert fields_of(shorter[index]) == fields_of(backwards[index])
    assert len({one[index].id for index in range(50)}) == 50
    with pytest.raises(IndexError):
        shorter[8]


@ALL
def test_another_seed_gives_another_set(source: Source) -> None:
    one, other = ([make_source(source, seed=seed)[i] for i in range(50)] for seed in (1, 2))
    assert [fields_of(sample) for sample in one] != [fields_of(sample) for sample in other]
    assert not {sample.id for sample in one} & {sample.id for sample in other}
    if source is not ShapePrompts:  # another seed only reorders its prompts
        assert not set(map(fields_of, one)) & set(map(fields_of, other))


@pytest.mark.slow
@ALL
def test_held_out_samples_share_no_contents_with_training_ones_whatever_the_seeds(
    source: Source,
) -> None:
    """Contents are compared: there are only a few thousand centred scenes of two shapes."""
    sets = [
        make_source(source, 200, seed=seed, held_out=held_out)
        for seed, held_out in ((1, False), (1, True), (2, True))
    ]
    training, *held_out = ([rows[i] for i in range(200)] for rows in sets)
    for other in held_out:
        contents = [{c for s in samples for c in contents_of(s)} for samples in (training, other)]
        assert not contents[0] & contents[1]
        assert not {sample.id for sample in training} & {sample.id for sample in other}


@ALL
def test_samples_have_the_fields_that_their_source_declares(source: Source) -> None:
    sample, provided = make_source(source)[0], source.provides(make_source(source).config)
    assert ("reference" in provided) == (sample.reference is not None)
    assert ("target_codes" in provided) == (sample.target_codes is not None)
    assert ("hidden:answer" in provided) == ("answer" in sample.hidden)
    if "source_codes" not in provided:
        assert ("source" in provided) == (sample.source is not None)


def test_target_and_reference_fulfil_the_instruction() -> None:
    kinds = set()
    for index in range(50):
        sample = make_source(Shapes)[index]
        assert sample.source.tobytes() != sample.target.tobytes()
        is_erased = sample.category == "erase"
        assert sample.reference.startswith("remove the" if is_erased else "turn the")
        kinds.add(sample.category)
    assert kinds == {"noun", "match", "erase"}


def test_source_and_target_codes_differ_in_the_four_codes_of_the_shape() -> None:
    sample = make_source(ShapeTokens)[0]
    assert sample.sources == () and sample.target is None
    assert (sample.source_codes != sample.target_codes).sum() == 4
