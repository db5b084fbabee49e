"""The best checkpoint on held-out samples: noted, kept, and found by its name."""

from __future__ import annotations

import json

import pytest
from tiny_checkpoints import checkpoints_in, names_in, save

from rl.record.best import BEST, Best, read_best
from rl.record.checkpoint import Checkpoints, checkpoint_of


def save_and_measure(checkpoints: Checkpoints, rewards: dict[int, float | None]) -> None:
    for iteration, reward in rewards.items():
        save(checkpoints, iteration)
        checkpoints.publish(iteration, lambda: "card", reward)


def test_the_best_stays_however_old(tmp_path):
    checkpoints = checkpoints_in(tmp_path)
    save_and_measure(checkpoints, {10: 0.25, 20: 0.75, 30: 0.5, 40: None, 50: 0.75, 60: 0.0})
    assert read_best(tmp_path) == Best("step_000020", 0.75)  # of equals the earlier
    assert names_in(tmp_path) == ["step_000020", "step_000050", "step_000060"]
    found = {which: checkpoint_of(tmp_path, which).name for which in ("best", "latest", "50")}
    assert found == {"best": "step_000020", "latest": "step_000060", "50": "step_000050"}
    save_and_measure(checkpoints, {70: 0.875, 80: 0.25})
    assert checkpoint_of(tmp_path, "best").name == "step_000070"
    assert names_in(tmp_path) == ["step_000070", "step_000080"]


def test_one_that_is_measured_again_has_the_newer_mark(tmp_path):
    checkpoints = checkpoints_in(tmp_path)
    save_and_measure(checkpoints, {10: 0.75, 20: 0.5})
    checkpoints.publish(10, lambda: "card", 0.25)
    assert read_best(tmp_path) == Best("step_000010", 0.25)
    save_and_measure(checkpoints, {20: 0.5})
    assert checkpoint_of(tmp_path, "best").name == "step_000020"


def test_one_that_is_gone_makes_room_for_a_worse(tmp_path):
    checkpoints = checkpoints_in(tmp_path)
    save_and_measure(checkpoints, {10: 0.75, 20: 0.25})
    (tmp_path / "checkpoints" / "step_000010").rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="measured"):
        checkpoint_of(tmp_path, "best")
    save_and_measure(checkpoints, {30: 0.125})
    assert checkpoint_of(tmp_path, "best").name == "step_000030"


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"checkpoint": 3, "reward": 1}',
        '{"checkpoint": "x", "reward": NaN}',
        f'{{"checkpoint": "x", "reward": {10**400}}}',
    ],
)
def test_a_damaged_note_is_made_anew(tmp_path, content):
    checkpoints = checkpoints_in(tmp_path)
    (tmp_path / BEST).write_text(content)
    save_and_measure(checkpoints, {10: 0.25})
    assert json.loads((tmp_path / BEST).read_text()) == {
        "checkpoint": "step_000010",
        "reward": 0.25,
    }


def test_what_is_asked_for_and_not_there_is_named(tmp_path):
    checkpoints = checkpoints_in(tmp_path)
    with pytest.raises(ValueError, match=r"no checkpoint .*: none"):
        checkpoint_of(tmp_path, "latest")
    save_and_measure(checkpoints, {10: 0.25, 20: None})
    with pytest.raises(ValueError, match=r"7 iterations; .*: 10, 20"):
        checkpoint_of(tmp_path, "7")
    with pytest.raises(ValueError, match=r"'newest'.* latest, best, or a number"):
        checkpoint_of(tmp_path, "newest")
    (tmp_path / "checkpoints" / "step_000010" / "state.json").unlink()
    with pytest.raises(ValueError, match=r"step_000010 .*state.json is missing"):
        checkpoint_of(tmp_path, "best")


def test_a_model_that_stays_alone_is_found_by_its_number(tmp_path):
    checkpoints = checkpoints_in(tmp_path, keep_every_n_iterations=10, keep="model")
    save_and_measure(checkpoints, {10: None, 20: None, 30: 0.5})
    assert checkpoint_of(tmp_path, "10") == tmp_path / "models" / "step_000010"
