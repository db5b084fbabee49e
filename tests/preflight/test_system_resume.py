"""Which config changes a run survives, and what the others are told."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_run import run_config

from rl.config.schema import RunConfig
from rl.preflight.resume import HARMLESS, LENGTH, NOTED, check_resume


def resolved(**changes: Any) -> dict[str, Any]:
    return run_config(**changes).model_dump(mode="json")


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"seed": 4}, "seed: 3 -> 4"),
        ({"prompts_per_iteration": 8}, "prompts_per_iteration: 2 -> 8"),
        ({"generations_per_prompt": 8}, "generations_per_prompt: 2 -> 8"),
        ({"max_staleness": 1}, "max_staleness: 0 -> 1"),
        (
            {"policy": {"type": "qwen2_5_vl", "model_path": "some/base", "lora": {"r": 16}}},
            "policy.lora.r: 8 -> 16",
        ),
        ({"renderer": {"type": "sd3"}}, "renderer.type: 'none' -> 'sd3'"),
        (
            {"rewards": {"judge": {"type": "viescore"}, "clip": {"type": "clip"}}},
            "rewards.clip.type: '(absent)' -> 'clip'",
        ),
        (
            {"data": {"train": [{"type": "edit_jsonl", "path": "other.jsonl"}]}},
            "data.train.0.path: 'train.jsonl' -> 'other.jsonl'",
        ),
        ({"sampling": {"temperature": 0.7}}, "sampling.temperature: 1.0 -> 0.7"),
        ({"algorithm": {"loss": "gspo"}}, "algorithm.loss: 'grpo' -> 'gspo'"),
        ({"optimizer": {"betas": (0.9, 0.99)}}, "optimizer.betas.1: 0.95 -> 0.99"),
        ({"judge": {"model": "other"}}, "judge.model:"),
        ({"final_reward": {"weights": {"judge": 2.0}}}, "final_reward.weights"),
    ],
)
def test_a_change_that_breaks_the_run_is_refused(change, line):
    with pytest.raises(ValueError) as refusal:
        check_resume(resolved(), resolved(**change))
    message = str(refusal.value)
    assert line in message
    assert "'tiny'" in message and "another run_name" in message


def test_all_breaking_keys_are_listed_at_once():
    changed = resolved(seed=4, renderer={"type": "sd3"}, num_iterations=9)
    with pytest.raises(ValueError) as refusal:
        check_resume(resolved(), changed)
    listed = [line for line in str(refusal.value).splitlines() if line.startswith("  ")]
    assert listed == ["  seed: 3 -> 4", "  renderer.type: 'none' -> 'sd3'"]


def test_what_does_not_touch_the_training_passes_in_silence():
    changed = resolved(
        base_exp_dir="moved",
        num_iterations=1000,
        checkpoint={"save_every_n_iterations": 5},
        tracking={"wandb": "offline"},
        judge={"api_base": ["http://a:1", "b:2"], "max_concurrency": 2, "timeout_s": 9},
        evaluation={"every_n_iterations": 5},
        data={
            "train": [{"type": "edit_jsonl", "path": "train.jsonl"}],
            "validation": [{"type": "edit_jsonl", "path": "held_out.jsonl"}],
        },
        policy={
            "type": "qwen2_5_vl",
            "model_path": "some/base",
            "lora": {"r": 8},
            "device": "cuda:1",
        },
    )
    assert check_resume(resolved(), changed) == []


def test_another_length_is_said_aloud_where_the_learning_rate_decays():
    decays = {"optimizer": {"final_lr_fraction": 0.1}}
    longer = resolved(num_iterations=9, **decays)
    assert check_resume(resolved(**decays), longer) == ["num_iterations: None -> 9"]
    assert check_resume(resolved(), resolved(num_iterations=9)) == []


def test_a_prompt_that_is_too_long_can_be_made_room_for():
    policy = {"type": "qwen2_5_vl", "model_path": "some/base", "lora": {"r": 8}}
    changed = resolved(policy={**policy, "max_prompt_tokens": 4096})
    assert check_resume(resolved(), changed) == ["policy.max_prompt_tokens: '(absent)' -> 4096"]


def test_what_changes_the_continuation_is_allowed_and_said():
    changed = resolved(
        world_size=4,
        optimizer={"learning_rate": 1e-6, "zero_stage": 3, "max_kept_tokens": 0},
        engine={"type": "transformers", "max_num_seqs": 64},
    )
    assert check_resume(resolved(), changed) == [
        "world_size: 1 -> 4",
        "engine.max_num_seqs: 4 -> 64",
        "optimizer.zero_stage: 2 -> 3",
        "optimizer.learning_rate: 1e-05 -> 1e-06",
        "optimizer.max_kept_tokens: None -> 0",
    ]


def test_the_same_config_in_another_spelling_is_the_same():
    assert check_resume(resolved(), resolved(sampling={"temperature": 1})) == []
    tuples = run_config().model_dump()  # before JSON made lists of its tuples
    assert check_resume(resolved(), tuples) == []


def test_the_table_names_keys_that_exist():
    """A renamed config key must not silently become one that breaks a run."""
    schema = resolved()
    patterns = [
        p for p in (*HARMLESS, *LENGTH, *NOTED) if "*" not in p and not p.startswith("policy.")
    ]
    for pattern in patterns:
        section: Any = schema
        for key in pattern.split("."):
            assert key in section, pattern
            section = section[key]
    sections = {p.partition(".")[0] for p in (*HARMLESS, *NOTED) if not p.startswith("*")}
    assert sections <= set(RunConfig.model_fields)


def test_a_checkpoint_older_than_a_key_goes_on_as_it_was() -> None:
    new = run_config().model_dump(mode="json")
    old = {key: value for key, value in new.items() if key != "max_staleness"}
    assert check_resume(old, new) == []
    with pytest.raises(ValueError, match="max_staleness: 0 -> 1"):
        check_resume(old, new | {"max_staleness": 1})
