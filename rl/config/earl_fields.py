"""Converts EARL's flat config fields to the nested schema, so that EARL files load unchanged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model

from rl.config.loading import validate

Values = dict[str, Any]

LONGEST_PROMPT = 1280
"""Tokens: 1065 for a 256x256 picture, the rest for the instruction and the prefill."""

FIXED: Values = {
    "policy": {"type": "emu3", "lora": None},
    "engine": {"type": "vllm"},
    "renderer": {"type": "emu3_vq"},
    "judge": {"max_tokens": 1400},
    "algorithm": {
        # EARL uses 1e-4 with rewards from 0 to 10.
        "advantage_eps": 1e-5,
        "loss": "dapo",
        "zero_spread_groups": "keep",
        "truncated_completions": "floor",
    },
    "optimizer": {
        "backend": "deepspeed",
        "zero_stage": 2,
        "betas": [0.9, 0.999],
        "gradient_checkpointing": True,
        "max_kept_tokens": 0,
    },
    "evaluation": {"every_n_iterations": 100, "temperature": 1.0, "top_k": 2048},
    "tracking": {"wandb": "online"},
}
"""Constants of EARL's code. EARL had no held-out evaluation; the one here uses its val set."""

MOVED: Mapping[str, str] = {
    "random_seed": "seed",
    "model_path": "policy.model_path",
    "model_revision": "policy.revision",
    "tokenizer_path": "policy.tokenizer_path",
    "assistant_prefill": "policy.assistant_prefill",
    "train_text_tokens_only": "policy.train_text_tokens_only",
    "text_only_cycle_steps": "policy.text_only_cycle_steps",
    "text_only_steps": "policy.text_only_steps",
    "train_vision_tokens_only": "policy.train_vision_tokens_only",
    "vision_only_cycle_steps": "policy.vision_only_cycle_steps",
    "vision_only_steps": "policy.vision_only_steps",
    "vllm_gpu_memory_utilization": "engine.gpu_memory_utilization",
    "learning_rate": "optimizer.learning_rate",
    "kl_coeff": "algorithm.kl_coeff",
    "generations_per_sample": "generations_per_prompt",
    "temperature": "sampling.temperature",
    "top_p": "sampling.top_p",
    "top_k": "sampling.top_k",
    "reward_function_api_base": "judge.api_base",
    "reward_function_api_model_name": "judge.model",
    "log_episodes_every_n_iterations": "tracking.log_episodes_every_n_iterations",
    "keep_checkpoints_every_n_iterations": "checkpoint.keep_every_n_iterations",
    "save_checkpoints_every_n_iterations": "checkpoint.save_every_n_iterations",
    "push_to_hub_every_n_iterations": "checkpoint.push_to_hub_every_n_iterations",
    "push_to_hub_repo_id": "checkpoint.push_to_hub_repo_id",
}
"""EARL's name -> our key, for fields that differ only in name; null keeps the default."""

KEPT = frozenset({"run_name", "base_exp_dir", "num_iterations"})
"""Fields of the same name and meaning."""

FINAL_REWARDS: Mapping[str, Values] = {
    "viescore": {"weights": {"viescore": 1}},
    "ground_score": {"weights": {"ground_score": 1}},
    "sqrt(viescore_pqxground_score)": {
        "op": "geometric_mean",
        "weights": {"viescore/pq_01": 1, "ground_score": 1},
    },
}

Count = Annotated[int, Field(ge=1)]


class Converted(BaseModel):
    """Fields whose values have to be converted, in EARL's units."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    train_paths_file: list[str] = []
    coefficients: list[float] = []
    val_paths_file: list[str] = []
    val_coefficients: list[Annotated[float, Field(ge=1, le=1)]] = []
    episodes_per_iteration: Count
    generations_per_sample: Count
    per_device_batch_size: Count | None = None
    model_context_size: Count
    max_response_tokens: Count
    max_completion_len: Count | None = None
    max_prompt_len: Count | None = None
    emu3_use_logit_processor: bool = True
    separate_language_and_vision_vocabs: bool = True
    reward_compute_viescore: bool = True
    reward_compute_ground_score: bool = True
    reward_final_reward: Literal["viescore", "ground_score", "sqrt(viescore_pqxground_score)"] = (
        "viescore"
    )


_OTHERS: Values = dict.fromkeys(KEPT.union(MOVED) - set(Converted.model_fields), (Any, None))
Fields = create_model("Fields", __base__=Converted, **_OTHERS)
"""All 43 fields of EARL."""


def is_flat(values: Mapping[str, Any], required: Sequence[str]) -> bool:
    """Whether a config is written in EARL's fields. `required`: the top-level keys that every
    config of the nested schema has."""
    nested_keys = (set(values) & set(required)) - KEPT
    return len(set(values) & (set(Fields.model_fields) - KEPT)) > len(nested_keys)


def nested(
    values: Mapping[str, Any], sections: Sequence[str], file_name: str
) -> tuple[Values, list[str]]:
    """(the same run in the nested schema, problems). `sections`: the schema's top-level keys;
    `file_name`: the run's name if `values` has none. Keys of the schema override EARL's fields."""
    direct = {name: values[name] for name in values if name in sections and name not in KEPT}
    # EARL also read the word 'none', in upper or lower case, as null.
    flat = {n: v for n, v in values.items() if n not in direct and str(v).lower() != "none"}
    fields, problems = validate(Fields, flat)
    if fields is None:
        return {}, problems
    run = deepcopy(FIXED) | {"run_name": file_name}
    for name, value in flat.items():
        if name in KEPT or name in MOVED:
            _put(run, MOVED.get(name, name), value)
    problems = _convert(fields, run)
    if not _merge(run, direct)["data"]["validation"]:
        _put(run, "evaluation.every_n_iterations", 0)
    return _merge(run, direct), problems


def _convert(fields: Converted, run: Values) -> list[str]:
    """Writes the converted `fields` into `run`; returns the problems found.

    These meanings differ from EARL: `coefficients` are exact shares of an endless mixture (EARL
    copies data sets or takes fixed subsets); a short context reduces `max_response_tokens`; a
    `per_device_batch_size` of n allows n completions with a prompt each, although a group's prompt
    is stored only once; rewards are 0 to 1, not 0 to 10 (the advantages are equal).
    """
    problems = []
    paths, coefficients = fields.train_paths_file, fields.coefficients
    if coefficients and len(coefficients) != len(paths):
        problems.append(
            f"coefficients: {len(coefficients)} for {len(paths)} train_paths_file; give one each, "
            "or [] for equal shares"
        )
    # No coefficients: every set is upsampled to the largest, that is, all have equal shares.
    shares = [{"coefficient": c} for c in coefficients] or [{} for _ in paths]
    run["data"] = {
        "train": [
            {"type": "emu3_tokens", "path": path} | share
            for path, share in zip(paths, shares, strict=False)
        ],
        "validation": [{"type": "emu3_tokens", "path": path} for path in fields.val_paths_file],
    }

    context, response = fields.model_context_size, fields.max_response_tokens
    prompt = fields.max_prompt_len or max(LONGEST_PROMPT, context - response)
    longest = min(response, context - prompt, fields.max_completion_len or response)
    if longest < 1:
        problems.append(
            f"model_context_size: {context} leaves no room beside a prompt of {prompt} tokens"
        )
    _put(run, "policy.max_prompt_tokens", prompt)
    _put(run, "sampling.max_completion_tokens", longest)
    _put(run, "engine.max_model_len", context)
    if (batch_size := fields.per_device_batch_size) is not None:
        _put(run, "optimizer.max_tokens_per_micro_batch", batch_size * (prompt + longest))

    _put(run, "policy.constrained", fields.emu3_use_logit_processor)
    if fields.emu3_use_logit_processor != fields.separate_language_and_vision_vocabs:
        problems.append(
            "emu3_use_logit_processor, separate_language_and_vision_vocabs: one is true and one "
            "false, so that the trainer would not train what was sampled; set both to one value"
        )

    final = fields.reward_final_reward
    run["final_reward"] = FINAL_REWARDS[final]
    run["rewards"] = {}
    for name in ("viescore", "ground_score"):
        if getattr(fields, f"reward_compute_{name}"):
            run["rewards"][name] = {"type": name}
        elif name in final:
            problems.append(
                f"reward_final_reward: {final} needs {name}; set reward_compute_{name}: true"
            )

    episodes, group = fields.episodes_per_iteration, fields.generations_per_sample
    run["prompts_per_iteration"] = episodes // group
    if episodes % group:
        problems.append(
            f"episodes_per_iteration: {episodes} completions are not whole groups of {group} "
            f"(generations_per_sample); use a multiple of {group}"
        )
    return problems


def _put(run: Values, key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for section in sections:
        run = run.setdefault(section, {})
    run[name] = value


def _merge(base: Values, over: Mapping[str, Any]) -> Values:
    """A copy of `base` updated with `over`, recursively."""
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged
