"""Which config changes a resumed run accepts, which it notes, and which it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

import pytest
from tiny_run import run_config

from rl.api.find import import_plugin, plugin_class
from rl.api.policy import LoraSection
from rl.build import PLUGIN_BASES, SHIPPED, class_path
from rl.check.compatibility import HARMLESS, NOTED, SCHEDULE, check_resume
from rl.config.schema import PluginSection, RunConfig, Section


def resolved(**changes: Any) -> dict[str, Any]:
    return run_config(**changes).model_dump(mode="json")


JUDGE = {"api_base": "http://a:1"}
POLICY = {"type": "qwen2_5_vl", "model_path": "some/base", "lora": {"r": 8}}
TRAIN = [{"type": "edit_jsonl", "path": "train.jsonl"}]
HELD_OUT = [{"type": "edit_jsonl", "path": "held_out.jsonl"}]
BREAKING: list[tuple[dict[str, Any], str]] = [
    ({"generations_per_prompt": 8}, "generations_per_prompt: 2 -> 8"),
    ({"max_staleness": 1}, "max_staleness: 0 -> 1"),
    ({"policy": POLICY | {"lora": {"r": 16}}}, "policy.lora.r: 8 -> 16"),
    ({"policy": POLICY | {"thought": {"marker": "."}}}, "policy.thought.marker: '(absent)' -> '.'"),
    ({"renderer": {"type": "sd3"}, "num_iterations": 9, "seed": 4},
     "seed: 3 -> 4\n  renderer.type: 'none' -> 'sd3'\nSet"),
    ({"rewards": {"judge": {"type": "viescore"}, "clip": {"type": "clip"}}},
     "rewards.clip.type: '(absent)' -> 'clip'"),
    ({"data": {"train": [TRAIN[0] | {"path": "other.jsonl"}]}},
     "data.train.0.path: 'train.jsonl' -> 'other.jsonl'"),
    ({"algorithm": {"loss": "gspo"}}, "algorithm.loss: 'dapo' -> 'gspo'"),
    ({"judge": JUDGE | {"model": "other"}}, "judge.model:"),
    ({"final_reward": {"weights": {"judge": 2.0}}}, "final_reward.weights"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "line"), BREAKING, ids=[line for _, line in BREAKING])
def test_a_change_that_breaks_the_run_is_refused(change: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError) as refusal:
        check_resume(resolved(), resolved(**change))
    message = str(refusal.value)
    assert line in message
    assert "'tiny'" in message and "another run_name" in message


NO_KL = {"algorithm": {"kl_coeff": 0.0, "zero_spread_groups": "drop"}}
ALLOWED: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
    # keys that training does not read
    ({}, {
        "base_exp_dir": "moved",
        "checkpoint": {"keep_every_n_iterations": 5},
        "tracking": {"wandb": "offline"},
        "judge": {"api_base": ["http://a:1", "b:2"], "max_concurrency": 2, "timeout_s": 9},
        "evaluation": {"num_samples": 5},
    }, []),
    ({}, {"judge": {"model": "other"}}, []),  # no judge is asked
    (NO_KL, {"algorithm": {"kl_coeff": 0.0, "zero_spread_groups": "kl_only"}}, []),
    ({}, {"policy": POLICY | {"max_prompt_tokens": 4096}},
     ["policy.max_prompt_tokens: '(absent)' -> 4096"]),
    ({}, {
        "world_size": 4,
        "optimizer": {"learning_rate": 1e-6, "zero_stage": 3, "max_kept_tokens": 0},
        "engine": {"type": "transformers", "max_num_seqs": 64},
    }, [
        "world_size: 1 -> 4",
        "engine.max_num_seqs: 4 -> 64",
        "optimizer.zero_stage: 2 -> 3",
        "optimizer.learning_rate: 1e-05 -> 1e-06",
        "optimizer.max_kept_tokens: None -> 0",
    ]),
    # what our messages advise when a judge refuses a question or a plan does not fit
    ({}, {
        "judge": JUDGE | {"max_tokens": 1024, "image_side_px": 512, "guided_json": "on_retry"},
        "optimizer": {"gradient_checkpointing": True, "max_tokens_per_micro_batch": 4096},
        "engine": {"type": "transformers", "max_num_seqs": 4, "residency": "sleep"},
        "renderer": {"type": "none", "batch_size": 1},
    }, [
        "optimizer.max_tokens_per_micro_batch", "judge.max_tokens", "judge.image_side_px",
        "judge.guided_json", "renderer.batch_size",
    ]),
    ({"renderer": {"type": "sd3", "device": "cuda:0"}},
     {"renderer": {"type": "sd3", "device": "cpu"}}, ["renderer.device: 'cuda:0' -> 'cpu'"]),
]  # fmt: skip


@pytest.mark.parametrize(("before", "after", "lines"), ALLOWED)
def test_other_changes_are_allowed_and_noted_where_they_matter(
    before: dict[str, Any], after: dict[str, Any], lines: list[str]
) -> None:
    notes = check_resume(resolved(**before), resolved(**after))
    assert len(notes) == len(lines), notes
    assert all(line.startswith(start) for line, start in zip(notes, lines, strict=True)), notes


def test_zero_spread_groups_may_not_change_if_there_is_a_kl_penalty() -> None:
    one, other = (
        resolved(algorithm={"kl_coeff": 0.1, "zero_spread_groups": rule})
        for rule in ("drop", "kl_only")
    )
    with pytest.raises(ValueError, match="zero_spread_groups"):
        check_resume(one, other)


def schema_keys(section: type[Section] = RunConfig, prefix: str = "") -> Iterator[str]:
    """Yields every key, with dots; a plugin's section yields only `type`."""
    for name, field in section.model_fields.items():
        key, annotation = f"{prefix}{name}", field.annotation
        if isinstance(annotation, type) and issubclass(annotation, Section):
            yield from schema_keys(annotation, f"{key}.")
        elif annotation == PluginSection or name == "rewards":
            yield f"{key}.type"
        else:
            yield key


def plugin_keys(directory: str) -> set[str]:
    """The keys of the shipped plugins' sections."""
    keys = set()
    for name in SHIPPED[directory]:
        module, _ = import_plugin(class_path(directory, name))
        cls, problems = plugin_class(module, PLUGIN_BASES[directory])
        assert cls is not None, problems
        keys |= set(cls.Config.model_fields)
    return keys


def test_every_key_that_may_change_exists_in_the_schema() -> None:
    """A renamed config key must not silently become one that breaks a run."""
    keys = set(schema_keys())
    for name, folder in (("policy", "policies"), ("engine", "engines"), ("renderer", "renderers")):
        keys |= {f"{name}.{key}" for key in plugin_keys(folder)}
    keys |= {f"policy.lora.{key}" for key in LoraSection.model_fields}
    keys |= {f"data.train.0.{key}" for key in plugin_keys("data")} | {"data.validation.0.path"}
    for pattern in (*HARMLESS, *SCHEDULE, *NOTED):
        assert any(fnmatchcase(key, pattern) for key in keys), pattern


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"checkpoint": {"save_every_n_iterations": 5}}, "checkpoint.save_every_n_iterations: 50 "),
        ({"checkpoint": {"push_to_hub_every_n_iterations": 5, "push_to_hub_repo_id": "me/run"}},
         "checkpoint.push_to_hub_every_n_iterations: 0 -> 5"),
        ({"evaluation": {"every_n_iterations": 5}}, "evaluation.every_n_iterations: 0 -> 5"),
        ({"num_iterations": 9}, "num_iterations: None -> 9"),
        ({"data": {"train": TRAIN, "validation": HELD_OUT}}, "data.validation: [] -> "),
    ],
)  # fmt: skip
def test_schedule_changes_are_noted(change: dict[str, Any], line: str) -> None:
    """They affect training if rollouts run ahead, and the length if the learning rate decays."""
    [note] = check_resume(resolved(), resolved(**change))
    assert note.startswith(line)


def test_a_key_missing_in_a_checkpoint_means_its_default() -> None:
    new = resolved(policy=POLICY | {"thought": None})
    old = {key: value for key, value in resolved().items() if key != "max_staleness"}
    assert check_resume(old, new) == []
    with pytest.raises(ValueError, match="max_staleness: 0 -> 1"):
        check_resume(old, new | {"max_staleness": 1})


def test_a_reward_that_trains_nothing_may_come_and_go_but_keeps_its_meaning() -> None:
    judge = {"model": "b", "api_base": "http://h:1"}
    second = {"type": "viescore", "held_out_only": True, "judge": judge}
    with_second = resolved(rewards={"judge": {"type": "viescore"}, "second": second})
    without = resolved(rewards={"judge": {"type": "viescore"}})
    assert check_resume(with_second, without) == check_resume(without, with_second) == []
    elsewhere = second | {"judge": judge | {"api_base": "http://h:2"}}
    changed = resolved(rewards={"judge": {"type": "viescore"}, "second": elsewhere})
    assert check_resume(with_second, changed) == []
    for change in ({"judge": judge | {"model": "c"}}, {"held_out_only": False}):
        changed = resolved(rewards={"judge": {"type": "viescore"}, "second": second | change})
        with pytest.raises(ValueError, match=r"rewards\.second\.(judge\.model|held_out_only)"):
            check_resume(with_second, changed)
    training = resolved(rewards={"judge": {"type": "viescore", "judge": judge}})
    with pytest.raises(ValueError, match=r"rewards\.judge\.judge\.model: 'b' -> "):
        check_resume(training, without)
