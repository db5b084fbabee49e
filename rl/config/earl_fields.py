"""EARL's flat config fields, read as the nested schema: an EARL user's file loads as it is.

Keys of our own schema may stand beside the 43 fields (33 of EARL's README, ten that only its code
reads): they win over what was fixed or left out, and may not contradict a field that is given.

Where the meaning is not EARL's: `coefficients` are exact shares of an endless mixture, not copies
and fixed subsets; the context's length cuts `max_response_tokens` when both do not fit; a
`per_device_batch_size` of n is room for the tokens of n completions with a prompt each, and holds
more of them, since a group's prompt is there once; rewards run from 0 to 1 here, from 0 to 10 there
(the advantages are equal).
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from rl.config.messages import MAX_PROBLEMS

Fields = dict[str, Any]

LONGEST_PROMPT = 1280
"""Tokens: a 256x256 picture's 1065, the instruction, the prefill."""

FIXED: Fields = {
    "policy": {"type": "emu3", "lora": None},
    "engine": {"type": "vllm"},
    "renderer": {"type": "emu3_vq"},
    "judge": {"max_tokens": 1400},
    "algorithm": {
        # 1e-4 on EARL's rewards from 0 to 10.
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
"""What EARL's code did not let one choose. It had no held-out run; this one uses its val set."""

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
"""Fields that only have another name here; null leaves the default."""

KEPT = frozenset({"run_name", "base_exp_dir", "num_iterations"})
"""Fields of the same name and meaning."""

MADE: Mapping[str, tuple[str, ...]] = {
    "data.train": ("train_paths_file", "coefficients"),
    "data.validation": ("val_paths_file",),
    "prompts_per_iteration": ("episodes_per_iteration", "generations_per_sample"),
    "optimizer.max_tokens_per_micro_batch": ("per_device_batch_size",),
    "sampling.max_completion_tokens": (
        "max_response_tokens", "max_completion_len", "max_prompt_len", "model_context_size",
    ),
    "engine.max_model_len": ("model_context_size",),
    "policy.max_prompt_tokens": ("max_prompt_len",),
    "policy.constrained": ("emu3_use_logit_processor", "separate_language_and_vision_vocabs"),
    "rewards.viescore": ("reward_compute_viescore",),
    "rewards.ground_score": ("reward_compute_ground_score",),
    "final_reward": ("reward_final_reward",),
}  # fmt: skip
"""What fields that are not just moved become, and of which of them."""

MEANT = frozenset({"val_coefficients"}.union(*MADE.values()))
"""All of these; val_coefficients only says nothing else than 1."""

FINAL_REWARDS: Mapping[str, Fields] = {
    "viescore": {"weights": {"viescore": 1}},
    "ground_score": {"weights": {"ground_score": 1}},
    "sqrt(viescore_pqxground_score)": {
        "op": "geometric_mean",
        "weights": {"viescore/pq_01": 1, "ground_score": 1},
    },
}

LISTS = ("train_paths_file", "coefficients", "val_paths_file", "val_coefficients")
NUMBERS = (
    "model_context_size", "max_response_tokens", "max_prompt_len", "max_completion_len",
    "per_device_batch_size",
)  # fmt: skip


def is_flat(values: Mapping[str, Any], required: Sequence[str]) -> bool:
    """Whether a config is written in EARL's fields, whatever stands beside them.

    `required` are the top-level keys that every config of our own schema has.
    """
    ours = (set(values) & set(required)) - KEPT
    return len(set(values) & {*MOVED, *MEANT}) > len(ours)


def misspelt(values: Mapping[str, Any]) -> list[str]:
    """Fields that cannot even be looked at: of another type than `nested` reads."""
    wanted: dict[str, tuple[type, str]] = {
        **dict.fromkeys(LISTS, (list, "a list")),
        **dict.fromkeys(NUMBERS, (int, "a whole number")),
        "reward_final_reward": (str, "one of " + ", ".join(FINAL_REWARDS)),
    }
    return [
        f"{name}: {values[name]!r} given, must be {words}"
        for name, (kind, words) in wanted.items()
        if values.get(name) is not None and type(values[name]) is not kind
    ]


def nested(
    values: Mapping[str, Any], sections: Sequence[str], file_name: str
) -> tuple[Fields, list[str]]:
    """(the same run in the nested schema, what cannot be said in it).

    `sections` are the schema's own top-level keys; `file_name`, the config's without its ending, is
    the run's name when it has none.
    """
    known = {*MOVED, *KEPT, *MEANT}
    unknown = [name for name in values if name not in known and name not in sections]
    problems = [
        f"{name}: unknown field; {_nearest(name, sorted(known))}" for name in unknown[:MAX_PROBLEMS]
    ]
    if len(unknown) > MAX_PROBLEMS:
        problems.append(f"and {len(unknown) - MAX_PROBLEMS} more unknown fields")
    fields = {name: value for name, value in values.items() if name in known}
    run = deepcopy(FIXED) | {name: fields[name] for name in KEPT if name in fields}
    if _is_none(run.get("run_name")):
        run["run_name"] = file_name
    for name, key in MOVED.items():
        value = fields.get(name)
        if not _is_none(value):
            _put(run, key, value)
    for part in (_data, _lengths, _vocabularies, _rewards, _batch):
        problems += part(fields, run)
    ours = {name: values[name] for name in values if name in sections and name not in KEPT}
    problems = problems or _conflicts(fields, run, ours)
    if not (_at(run, "data.validation") or _at(ours, "data.validation")):
        _put(run, "evaluation.every_n_iterations", 0)
    return _merge(run, ours), problems


def _conflicts(fields: Fields, run: Fields, ours: Fields) -> list[str]:
    """Our own keys that say something else than the fields beside them."""
    problems = []
    for key, names in {**MADE, **{key: (name,) for name, key in MOVED.items()}}.items():
        given = [n for n in names if not _is_none(fields.get(n)) and fields[n] != []]
        own, made = _at(ours, key), _at(run, key)
        if given and own is not None and not _agrees(own, made):
            stated = ", ".join(f"{name}: {reprlib.repr(fields[name])}" for name in given)
            meant = "leaves it out" if made is None else f"means {key}: {reprlib.repr(made)}"
            problems.append(
                f"{key}: {reprlib.repr(own)} given beside {stated}, which {meant}; keep one of them"
            )
    return problems


def _agrees(own: Any, made: Any) -> bool:
    if isinstance(own, Mapping) and isinstance(made, Mapping):
        return all(_agrees(own[key], made[key]) for key in own if key in made)
    return bool(own == made)


def _is_none(value: Any) -> bool:
    """EARL read the word as well, in any case."""
    return value is None or (isinstance(value, str) and value.lower() == "none")


def _data(fields: Fields, run: Fields) -> list[str]:
    paths, coefficients = fields.get("train_paths_file") or [], fields.get("coefficients") or []
    validation = fields.get("val_paths_file") or []
    problems = []
    if coefficients and len(coefficients) != len(paths):
        problems.append(
            f"coefficients: {len(coefficients)} for {len(paths)} train_paths_file; give one each, "
            "or [] for equal shares"
        )
    if any(coefficient != 1 for coefficient in fields.get("val_coefficients") or []):
        problems.append("val_coefficients: the validation set is read as it is; use 1.0 or drop it")
    # No coefficients: every set is upsampled to the largest, that is, all have equal shares.
    shares = [{"coefficient": c} for c in coefficients] or [{} for _ in paths]
    run["data"] = {
        "train": [
            {"type": "emu3_tokens", "path": path} | share
            for path, share in zip(paths, shares, strict=False)
        ],
        "validation": [{"type": "emu3_tokens", "path": path} for path in validation],
    }
    return problems


def _lengths(fields: Fields, run: Fields) -> list[str]:
    context, response = fields.get("model_context_size"), fields.get("max_response_tokens")
    if context is None or response is None:
        missing = "model_context_size" if context is None else "max_response_tokens"
        return [f"{missing}: missing; EARL's base config has model_context_size 3000, "
                "max_response_tokens 2048"]  # fmt: skip
    prompt = fields.get("max_prompt_len") or max(LONGEST_PROMPT, context - response)
    longest = min(response, context - prompt, fields.get("max_completion_len") or response)
    if longest < 1:
        return [f"model_context_size: {context} leaves no room beside a prompt of {prompt} tokens"]
    _put(run, "policy.max_prompt_tokens", prompt)
    _put(run, "sampling.max_completion_tokens", longest)
    _put(run, "engine.max_model_len", context)
    at_once = fields.get("per_device_batch_size")
    if at_once is not None:
        _put(run, "optimizer.max_tokens_per_micro_batch", at_once * (prompt + longest))
    return []


def _vocabularies(fields: Fields, run: Fields) -> list[str]:
    names = ("emu3_use_logit_processor", "separate_language_and_vision_vocabs")
    constrained, separate = (fields.get(name, True) for name in names)
    _put(run, "policy.constrained", constrained)
    if constrained == separate:
        return []
    return [
        f"{names[0]}, {names[1]}: one is true and one false, so that the trainer would not train "
        "what was sampled; set both alike"
    ]


def _rewards(fields: Fields, run: Fields) -> list[str]:
    names = ("viescore", "ground_score")
    computed = [name for name in names if fields.get(f"reward_compute_{name}", True)]
    run["rewards"] = {name: {"type": name} for name in computed}
    final = fields.get("reward_final_reward") or "viescore"
    if final not in FINAL_REWARDS:
        return [f"reward_final_reward: {final!r} given, must be one of {', '.join(FINAL_REWARDS)}"]
    run["final_reward"] = FINAL_REWARDS[final]
    needed = {name.partition("/")[0] for name in FINAL_REWARDS[final]["weights"]}
    return [
        f"reward_final_reward: {final} needs {name}; set reward_compute_{name}: true"
        for name in sorted(needed - set(computed))
    ]


def _batch(fields: Fields, run: Fields) -> list[str]:
    episodes, group = fields.get("episodes_per_iteration"), fields.get("generations_per_sample")
    if not isinstance(episodes, int) or not isinstance(group, int) or group < 1:
        return ["episodes_per_iteration, generations_per_sample: both must be whole numbers >= 1"]
    run["prompts_per_iteration"] = episodes // group
    if episodes % group:
        near = episodes // group * group
        return [
            f"episodes_per_iteration: {episodes} completions are not whole groups of {group} "
            f"(generations_per_sample); use {near} or {near + group}"
        ]
    return []


def _at(run: Mapping[str, Any], key: str) -> Any:
    value: Any = run
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _put(run: Fields, key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for section in sections:
        run = run.setdefault(section, {})
    run[name] = value


def _merge(base: Fields, over: Mapping[str, Any]) -> Fields:
    """`over` wins, section by section."""
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def _nearest(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else "EARL had none of that name"
