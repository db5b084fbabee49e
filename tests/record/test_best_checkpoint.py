"""The best checkpoint by held-out reward in metrics.jsonl: it is kept and can be named `best`."""

from __future__ import annotations

import pytest
from tiny_checkpoints import names_in, save

from rl.files import append_line, json_line
from rl.record.checkpoint import Checkpoints, checkpoint_of, held_out_rewards


def save_and_measure(checkpoints: Checkpoints, rewards: dict[int, float | None]) -> None:
    for iteration, reward in rewards.items():
        save(checkpoints, iteration, reward=reward)


def test_the_best_checkpoint_is_kept_however_old(checkpoints, tmp_path):
    save_and_measure(checkpoints, {10: 0.25, 20: 0.75, 30: 0.5, 40: None, 50: 0.75, 60: 0.0})
    assert names_in(tmp_path) == ["step_000020", "step_000050", "step_000060"]
    # Of two with equal rewards, the earlier is the best.
    assert checkpoint_of(tmp_path, "best").name == "step_000020"
    assert checkpoint_of(tmp_path, "50").name == "step_000050"
    save_and_measure(checkpoints, {70: 0.875, 80: 0.25})
    assert checkpoint_of(tmp_path, "best").name == "step_000070"
    assert names_in(tmp_path) == ["step_000070", "step_000080"]


def test_the_last_line_of_an_iteration_counts_and_a_missing_checkpoint_is_skipped(
    checkpoints, tmp_path
):
    save_and_measure(checkpoints, {10: 0.75, 20: 0.5})
    metrics = tmp_path / "metrics.jsonl"
    append_line(metrics, json_line({"iteration": 10, "eval/reward": 0.25}))
    assert checkpoint_of(tmp_path, "best").name == "step_000020"
    (tmp_path / "checkpoints" / "step_000020").rename(tmp_path / "elsewhere")
    assert checkpoint_of(tmp_path, "best").name == "step_000010"
    metrics.unlink()  # a restarted run sets it aside
    with pytest.raises(ValueError, match="no checkpoint 'best'"):
        checkpoint_of(tmp_path, "best")


BEST, LATER = {10: 0.75}, {20: 0.25, 30: None, 40: None, 50: 0.125}
STATE = "checkpoints/step_000010/state.json"


@pytest.mark.parametrize(
    ("before", "file", "text", "after"),
    [
        (BEST, "metrics.jsonl", '{"iteration": 10, "eval/rew\n', LATER),
        (BEST, "metrics.jsonl", '{"iteration": "10"}\n', LATER),
        (BEST, "metrics.jsonl", "\n", LATER),
        (BEST | {20: 0.5}, STATE, "", {30: 0.25, 40: 0.0, 50: 0.0}),
    ],
)
def test_a_checkpoint_that_may_be_the_best_is_kept(
    checkpoints, tmp_path, before, file, text, after
):
    """Its line is damaged or missing; if it is itself, the best undamaged one is kept, too."""
    save_and_measure(checkpoints, before)
    (tmp_path / file).write_text(text)
    save_and_measure(checkpoints, after)
    assert names_in(tmp_path) == [f"step_0000{n}" for n in (10, 20, 40, 50)]


@pytest.mark.parametrize(
    ("measured", "is_kept"),
    [
        ({"reward": None, "ungraded": 1.0}, True),
        ({"reward": None, "ungraded": 1.0, "unreadable": 1.0}, True),
        ({"reward": 0.5, "ungraded": 0.5}, True),  # up to 0.75
        ({"reward": 0.5, "ungraded": 0.25}, False),  # up to 0.625
        ({"reward": 0.5, "ungraded": 0.5, "unreadable": 0.5}, False),
        ({"reward": 0.5, "ungraded": 0.0}, False),
        ({"reward": None}, False),  # no evaluation
    ],
)
def test_a_checkpoint_with_ungraded_samples_that_may_be_the_best_is_kept(
    checkpoints, tmp_path, measured, is_kept
):
    save(checkpoints, 10, **measured)
    save_and_measure(checkpoints, {20: 0.625, 30: 0.25, 40: 0.5, 50: None})
    assert names_in(tmp_path) == [
        *["step_000010"] * is_kept, "step_000020", "step_000040", "step_000050",
    ]  # fmt: skip


@pytest.mark.parametrize("reward", ["NaN", "true", '"high"', str(10**400), "1e300", "[1]"])
def test_an_invalid_reward_counts_as_none(tmp_path, reward):
    (tmp_path / "metrics.jsonl").write_text(f'{{"iteration": 3, "eval/reward": {reward}}}\n')
    assert held_out_rewards(tmp_path) == {0: None, 3: None}


def test_an_unmeasured_checkpoint_before_training_is_not_the_best(checkpoints, tmp_path):
    save(checkpoints, 0)
    assert names_in(tmp_path) == ["step_000000"]
    with pytest.raises(ValueError, match="evaluations measured"):
        checkpoint_of(tmp_path, "best")


def test_a_missing_checkpoint_is_named_in_the_error(checkpoints, tmp_path):
    with pytest.raises(ValueError, match=r"no checkpoint '7'.*: none"):
        checkpoint_of(tmp_path, "7")
    save_and_measure(checkpoints, {10: 0.25, 20: None})
    with pytest.raises(ValueError, match=r"no checkpoint '7'.*: 10, 20"):
        checkpoint_of(tmp_path, "7")
    with pytest.raises(ValueError, match=r"'newest'.* latest, best .*, or a number"):
        checkpoint_of(tmp_path, "newest")
    (tmp_path / "checkpoints" / "step_000010" / "state.json").unlink()
    with pytest.raises(ValueError, match=r"step_000010 .*state.json is missing"):
        checkpoint_of(tmp_path, "best")
