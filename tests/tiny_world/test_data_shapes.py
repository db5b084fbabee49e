"""The tiny world's data source: a pure function of (seed, index)."""

from __future__ import annotations

import pytest

from rl.api.data import RowRules
from tiny_world import scenes
from tiny_world.data import shapes
from tiny_world.data.synthetic import MadeConfig


def source(**more) -> shapes.Shapes:
    config = MadeConfig.model_validate({"type": "shapes", "num_samples": 50, **more})
    assert shapes.Shapes.problems(config, RowRules("error", 8192)) == []
    assert shapes.Shapes.count(config) == config.num_samples
    return shapes.Shapes(config, RowRules("error", 8192))


def test_a_sample_depends_on_seed_and_index_alone():
    one, other = source(), source(num_samples=8)
    assert (len(one), len(other)) == (50, 8)
    backwards = {index: one[index] for index in reversed(range(8))}
    for index in range(8):
        again = other[index]
        assert again.source.tobytes() == backwards[index].source.tobytes()
        assert (again.id, again.instruction, again.reference) == (
            backwards[index].id,
            backwards[index].instruction,
            backwards[index].reference,
        )
    assert len({one[index].id for index in range(50)}) == 50
    with pytest.raises(IndexError):
        other[8]


def test_another_seed_is_held_out():
    one, other = source(seed=1), source(seed=2)
    pictures = [{s[index].source.tobytes() for index in range(50)} for s in (one, other)]
    assert not pictures[0] & pictures[1]
    assert one[0].id != other[0].id


def test_target_and_reference_fulfil_the_instruction():
    kinds = set()
    for index in range(50):
        sample = source()[index]
        assert sample.source.tobytes() != sample.target.tobytes()
        assert sample.reference.startswith(
            "remove the" if sample.category == "erase" else "turn the"
        )
        kinds.add(sample.category)
    assert kinds == set(scenes.KIND_SHARES)
