"""Which config changes a run survives, and what the others are told."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

import pytest
from tiny_run import run_config

from rl.api.find import import_plug, plug_class
from rl.api.policy import LoraSection
from rl.build import ROOMS, module_of, plugs_of
from rl.config.schema import PlugSection, RunConfig, Section
from rl.preflight.resume import BREAKS, HARMLESS, LENGTH, LEVEL, NOTED, check_resume


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
        ({"algorithm": {"loss": "gspo"}}, "algorithm.loss: 'dapo' -> 'gspo'"),
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


def test_groups_without_spread_may_lose_their_kl_where_there_is_none():
    def switch(kl_coeff: float, old: str, new: str) -> list[str]:
        one, other = (
            resolved(algorithm={"kl_coeff": kl_coeff, "zero_spread_groups": rule})
            for rule in (old, new)
        )
        return check_resume(one, other)

    assert switch(0.0, "drop", "kl_only") == []
    for change in ((0.1, "drop", "kl_only"), (0.0, "drop", "keep")):
        with pytest.raises(ValueError, match="zero_spread_groups"):
            switch(*change)


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


def schema_keys(section: type[Section] = RunConfig, prefix: str = "") -> Iterator[str]:
    """Every key, dotted; of what a plug reads `type` alone."""
    for name, field in section.model_fields.items():
        key, found = f"{prefix}{name}", field.annotation
        if isinstance(found, type) and issubclass(found, Section):
            yield from schema_keys(found, f"{key}.")
        elif found == PlugSection or name == "rewards":
            yield f"{key}.type"
        else:
            yield key


def plug_keys(room: str) -> set[str]:
    """Those of the shipped plugs' own sections."""
    found = set()
    for name in plugs_of(room):
        module, _ = import_plug(module_of(room, name))
        cls, problems = plug_class(module, ROOMS[room])
        assert cls is not None, problems
        found |= set(cls.Config.model_fields)
    return found


def test_every_key_of_the_schema_is_classified() -> None:
    """A new key is thought about: it fails here until a line of the table names it."""
    table = {"harmless": HARMLESS, "level": LEVEL, "length": LENGTH, "noted": NOTED}
    table["breaks"] = BREAKS
    for key in schema_keys():
        classes = [
            name
            for name, patterns in table.items()
            if any(fnmatchcase(key, pattern) for pattern in patterns)
        ]
        assert len(classes) == 1, (key, classes)


def test_the_table_names_keys_that_exist() -> None:
    """A renamed config key must not silently become one that breaks a run."""
    keys = set(schema_keys())
    for section, room in (("policy", "policies"), ("engine", "engines"), ("renderer", "renderers")):
        keys |= {f"{section}.{key}" for key in plug_keys(room)}
    keys |= {f"policy.lora.{key}" for key in LoraSection.model_fields}
    keys |= {f"data.train.0.{key}" for key in plug_keys("data")} | {"data.validation.0.path"}
    for pattern in (*HARMLESS, *LEVEL, *LENGTH, *NOTED, *BREAKS):
        matched = [key for key in keys if fnmatchcase(key, pattern)]
        assert matched, pattern


CADENCE = [
    {"checkpoint": {"save_every_n_iterations": 5}},
    {"checkpoint": {"push_to_hub_every_n_iterations": 5, "push_to_hub_repo_id": "me/run"}},
    {"evaluation": {"every_n_iterations": 5}},
    {"num_iterations": 9},
    {
        "data": {
            "train": [{"type": "edit_jsonl", "path": "train.jsonl"}],
            "validation": [{"type": "edit_jsonl", "path": "held_out.jsonl"}],
        }
    },
]


@pytest.mark.parametrize("change", CADENCE, ids=lambda change: next(iter(change)))
def test_what_sets_when_rollouts_start_level_is_said_where_they_run_ahead(change: Any) -> None:
    """On-policy, checkpoints and held-out runs do not touch what is learnt."""
    assert check_resume(resolved(), resolved(**change)) == []
    [line] = check_resume(resolved(max_staleness=1), resolved(max_staleness=1, **change))
    assert line.startswith((
        "checkpoint.save_every_n_iterations: 50 -> 5",
        "checkpoint.push_to_hub_every_n_iterations: 0 -> 5",
        "evaluation.every_n_iterations: 0 -> 5",
        "num_iterations: None -> 9",
        "data.validation: [] -> ",
    ))  # fmt: skip


@pytest.mark.parametrize(
    ("before", "after", "lines"),
    [
        ("auto", "cuda:1", []),
        ("cuda:0", "cuda:1", []),
        ("cuda:0", "cpu", ["renderer.device: 'cuda:0' -> 'cpu'"]),
    ],
)
def test_another_gpu_is_not_another_kind_of_device(
    before: str, after: str, lines: list[str]
) -> None:
    old, new = (resolved(renderer={"type": "sd3", "device": d}) for d in (before, after))
    assert check_resume(old, new) == lines


def test_what_a_message_of_ours_tells_to_change_may_be_changed() -> None:
    """A judge that refuses a question stops the run, and names these; so does a plan that does not
    fit."""
    changed = resolved(
        judge={"max_tokens": 1024, "image_side_px": 512, "guided_json": "on_retry"},
        optimizer={"gradient_checkpointing": True, "max_tokens_per_micro_batch": 4096},
        engine={"type": "transformers", "max_num_seqs": 4, "residency": "sleep"},
        renderer={"type": "none", "batch_size": 1},
    )
    noted = [line.partition(":")[0] for line in check_resume(resolved(), changed)]
    assert noted == [
        "optimizer.max_tokens_per_micro_batch", "judge.max_tokens", "judge.image_side_px",
        "judge.guided_json", "renderer.batch_size",
    ]  # fmt: skip


def test_a_checkpoint_older_than_a_key_goes_on_as_it_was() -> None:
    new = run_config().model_dump(mode="json")
    old = {key: value for key, value in new.items() if key != "max_staleness"}
    assert check_resume(old, new) == []
    with pytest.raises(ValueError, match="max_staleness: 0 -> 1"):
        check_resume(old, new | {"max_staleness": 1})
