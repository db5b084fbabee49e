"""Which config changes a resumed run accepts, which it notes, and which it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

import pytest
import tiny_config
from tiny_run import run_config

from rl.api.find import import_plugin, plugin_class
from rl.api.policy import LoraSection
from rl.build import PLUGIN_BASES, SHIPPED, class_path
from rl.check.compatibility import HARMLESS, NOTED, SCHEDULE, check_resume
from rl.config.schema import PluginSection, RunConfig, Section


def resolved(*overrides: str, **changes: Any) -> dict[str, Any]:
    values = run_config(**changes).model_dump(mode="json")
    return RunConfig.model_validate(tiny_config.changed(values, *overrides)).model_dump(mode="json")


BREAKING = [
    ("generations_per_prompt=8", "generations_per_prompt: 2 -> 8"),
    ("max_staleness=1", "max_staleness: 0 -> 1"),
    ("policy.lora.r=16", "policy.lora.r: 8 -> 16"),
    ("policy.thought.marker=.", "policy.thought.marker: '(absent)' -> '.'"),
    ("renderer.type=sd3", "num_iterations=9", "seed=4",
     "seed: 3 -> 4\n  renderer.type: 'none' -> 'sd3'\nSet"),
    ("rewards.clip.type=clip", "rewards.clip.type: '(absent)' -> 'clip'"),
    ('data.train=[{"type": "edit_jsonl", "path": "other.jsonl"}]',
     "data.train.0.path: 'train.jsonl' -> 'other.jsonl'"),
    ("algorithm.loss=gspo", "algorithm.loss: 'dapo' -> 'gspo'"),
    ("judge.api_base=http://a:1", "judge.model=other", "judge.model:"),
    ("algorithm.kl_coeff=0.1", "algorithm.zero_spread_groups=drop",
     "zero_spread_groups: 'kl_only' -> 'drop'"),
    ("final_reward.weights.judge=2.0", "final_reward.weights"),
]  # fmt: skip
"""Changes, then a line of the message."""


@pytest.mark.parametrize("row", BREAKING, ids=[row[-1] for row in BREAKING])
def test_a_change_that_breaks_the_run_is_refused(row: tuple[str, ...]) -> None:
    *overrides, line = row
    with pytest.raises(ValueError) as refusal:
        check_resume(resolved(), resolved(*overrides))
    message = str(refusal.value)
    assert line in message
    assert "'tiny'" in message and "another run_name" in message


ALLOWED: list[tuple[list[str], list[str], list[str]]] = [
    # keys that training does not read
    ([], ["base_exp_dir=moved", "checkpoint.keep_every_n_iterations=5", "tracking.wandb=offline",
          'judge.api_base=["http://a:1", "b:2"]', "judge.max_concurrency=2", "judge.timeout_s=9",
          "evaluation.num_samples=5"], []),
    ([], ["judge.model=other"], []),  # no judge is asked
    (["algorithm.zero_spread_groups=drop"], [], []),  # there is no KL term
    ([], ["policy.max_prompt_tokens=4096"], ["policy.max_prompt_tokens: '(absent)' -> 4096"]),
    ([], ["world_size=4", "optimizer.learning_rate=1e-6", "optimizer.zero_stage=3",
          "optimizer.max_kept_tokens=0", "engine.max_num_seqs=64"], [
        "world_size: 1 -> 4",
        "engine.max_num_seqs: 4 -> 64",
        "optimizer.zero_stage: 2 -> 3",
        "optimizer.learning_rate: 1e-05 -> 1e-06",
        "optimizer.max_kept_tokens: None -> 0",
    ]),
    # what our messages advise when a judge refuses a question or a plan does not fit
    ([], ["judge.api_base=http://a:1", "judge.max_tokens=1024", "judge.image_side_px=512",
          "judge.guided_json=on_retry", "optimizer.gradient_checkpointing=true",
          "optimizer.max_tokens_per_micro_batch=4096", "engine.residency=sleep",
          "renderer.batch_size=1"], [
        "optimizer.max_tokens_per_micro_batch", "judge.max_tokens", "judge.image_side_px",
        "judge.guided_json", "renderer.batch_size",
    ]),
    # the schedule: it affects training if rollouts run ahead, and the length if the rate decays
    ([], ["checkpoint.save_every_n_iterations=5"], ["checkpoint.save_every_n_iterations: 50 "]),
    ([], ["checkpoint.push_to_hub_every_n_iterations=5",
          "checkpoint.push_to_hub_repo_id=me/run"],
     ["checkpoint.push_to_hub_every_n_iterations: 0 -> 5"]),
    ([], ["evaluation.every_n_iterations=5"], ["evaluation.every_n_iterations: 0 -> 5"]),
    ([], ["num_iterations=9"], ["num_iterations: None -> 9"]),
    ([], ['data.validation=[{"type": "edit_jsonl", "path": "held_out.jsonl"}]'],
     ["data.validation: [] -> "]),
    (["renderer.type=sd3", "renderer.device=cuda:0"],
     ["renderer.type=sd3", "renderer.device=cpu"], ["renderer.device: 'cuda:0' -> 'cpu'"]),
]  # fmt: skip


@pytest.mark.parametrize(("before", "after", "lines"), ALLOWED)
def test_other_changes_are_allowed_and_noted_where_they_matter(
    before: list[str], after: list[str], lines: list[str]
) -> None:
    notes = check_resume(resolved(*before), resolved(*after))
    assert len(notes) == len(lines), notes
    assert all(line.startswith(start) for line, start in zip(notes, lines, strict=True)), notes


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


def test_a_key_missing_in_a_checkpoint_means_its_default() -> None:
    new = resolved("policy.thought=null")
    old = {key: value for key, value in resolved().items() if key != "max_staleness"}
    assert check_resume(old, new) == []
    with pytest.raises(ValueError, match="max_staleness: 0 -> 1"):
        check_resume(old, new | {"max_staleness": 1})


def test_a_reward_that_trains_nothing_may_come_and_go_but_keeps_its_meaning() -> None:
    second = [
        "rewards.second.type=viescore",
        "rewards.second.held_out_only=true",
        'rewards.second.judge={"model": "b", "api_base": "http://h:1"}',
    ]
    with_second, without = resolved(*second), resolved()
    assert check_resume(with_second, without) == check_resume(without, with_second) == []
    elsewhere = resolved(*second, "rewards.second.judge.api_base=http://h:2")
    assert check_resume(with_second, elsewhere) == []
    for change in ("judge.model=c", "held_out_only=false"):
        with pytest.raises(ValueError, match=f"rewards.second.{change.split('=')[0]}"):
            check_resume(with_second, resolved(*second, f"rewards.second.{change}"))
    training = resolved('rewards.judge.judge={"model": "b", "api_base": "http://h:1"}')
    with pytest.raises(ValueError, match=r"rewards\.judge\.judge\.model: 'b' -> "):
        check_resume(training, without)
