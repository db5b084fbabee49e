"""May a run go on under a config that is not the one it was started with?

A key that no list here names breaks it: what a run was optimising, from what data and with which
shapes, may not change under one name.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal

Effect = Literal["harmless", "noted", "breaks"]
"""harmless: what is trained stays, up to the last bit where it is exact; noted: allowed, and said
aloud, the continuation is no longer the run that would have been; breaks: refused."""

HARMLESS = (
    "format",  # another one is refused
    "run_name", "base_exp_dir",  # the folder was moved
    "gpu_gb",  # a plan's
    "checkpoint.keep_every_n_iterations", "checkpoint.push_to_hub_repo_id",
    "tracking.wandb", "tracking.wandb_project", "tracking.tensorboard", "tracking.trackio",
    "tracking.trackio_space", "tracking.log_episodes_every_n_iterations",
    "tracking.images_per_iteration", "tracking.keep_images_of_last_n_iterations",
    "tracking.show_group_every_n_iterations",
    "tracking.page",
    # The held-out curve goes on under another meaning; nothing is trained on it.
    "evaluation.num_samples", "evaluation.temperature", "evaluation.top_k",
    "evaluation.reference_drift", "evaluation.stock_arm", "evaluation.thought_gain",
    "data.validation.*",
    # Where the judge is and how patiently it is asked, not what it says.
    "judge.api_base*", "judge.start_command*", "judge.start_timeout_s", "judge.api_key_env",
    "judge.max_concurrency", "judge.timeout_s", "judge.backoff_s", "judge.breaker_failures",
    "judge.breaker_pause_s", "judge.max_outage_s", "judge.max_failure_rate",
    "max_render_failure_rate", "hang_limit_s",
    "optimizer.gradient_checkpointing",  # the same kernels over the same numbers, twice
    "policy.max_kept_pictures",
    "policy.lora.init_seed",  # drawn before the first iteration
    "engine.residency",  # it wakes with the weights it fell asleep with, proven
    "*.device",  # but see `effect`
)  # fmt: skip

LEVEL = (
    "checkpoint.save_every_n_iterations", "checkpoint.push_to_hub_every_n_iterations",
    "evaluation.every_n_iterations", "data.validation",  # as a whole: there is none
)  # fmt: skip
"""Harmless where rollouts are on-policy. Under `max_staleness: 1` they start level at every
checkpoint and held-out run: with others of these, other iterations learn from stale completions."""

LENGTH = ("num_iterations", "num_epochs")
"""Harmless on-policy under a constant learning rate. One that decays falls along another line; and
the last iteration ends level."""

NOTED = (
    # The same mathematics, other rounding. (Under updates_per_iteration > 1 each rank cuts its own
    # prompts into steps: with another world_size a step is of other groups.)
    "world_size", "optimizer.backend", "optimizer.zero_stage", "*batch_size", "*.max_memory_gb",
    "optimizer.max_tokens_per_micro_batch", "optimizer.max_kept_tokens", "bare_arm",
    "policy.attn_implementation", "engine.*",
    # How one gets past what stopped the run: a sample, a row or a question that was too long, a
    # reply that could not be read.
    "policy.max_prompt_tokens", "data.on_bad_row", "data.max_image_side_px",
    "renderer.max_pictures",
    "data.train.*.picture_check",
    "judge.guided_json", "judge.max_attempts", "judge.max_tokens", "judge.image_side_px",
    # Tuned by hand.
    "optimizer.learning_rate", "optimizer.final_lr_fraction", "optimizer.warmup_iterations",
)  # fmt: skip

BREAKS = (
    "seed", "prompts_per_iteration", "generations_per_prompt", "images_per_completion",
    "max_staleness", "data.train*", "final_reward.op", "final_reward.weights*",
    "sampling.temperature", "sampling.top_p", "sampling.top_k", "sampling.max_completion_tokens",
    "algorithm.advantage_scale", "algorithm.advantage_eps", "algorithm.loss", "algorithm.clip_low",
    "algorithm.clip_high", "algorithm.kl_coeff", "algorithm.kl_estimator",
    "algorithm.kl_placement", "algorithm.importance_correction", "algorithm.importance_cap",
    "algorithm.zero_spread_groups", "algorithm.truncated_completions",
    "algorithm.policy_failed_reward", "algorithm.shuffle_rewards",
    "optimizer.betas*", "optimizer.adam_eps", "optimizer.weight_decay", "optimizer.max_grad_norm",
    "optimizer.updates_per_iteration",
    "judge.model", "judge.temperature",
    # Whatever else a plug reads.
    "policy.*", "renderer.*", "rewards.*",
)  # fmt: skip
"""Listed so that a new key of the schema is thought about (tested); others break a run as well."""

SINCE = {"max_staleness": 0, "policy.thought": None}
"""Keys that older checkpoints lack, and how those runs behaved."""

_ABSENT = "(absent)"


def check_resume(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Compare the checkpoint's resolved config with today's; returns the changes worth a line.

    Raises ValueError with every differing key that breaks the run, old and new value, and the way
    out.
    """
    old_flat, new_flat = _flatten(old), _flatten(new)
    keys = [*old_flat, *(key for key in new_flat if key not in old_flat)]
    breaking: list[str] = []
    noted: list[str] = []
    for key in keys:
        before = old_flat.get(key, SINCE.get(key, _ABSENT))
        after = new_flat.get(key, _ABSENT)
        if before == after:
            continue
        found = effect(key, new)
        if found == "harmless" and key.endswith(".device") and "cpu" in (before, after):
            found = "noted"  # other kernels
        if key == "algorithm.zero_spread_groups" and "keep" not in (before, after):
            # 'drop' and 'kl_only' differ by a KL.
            found = found if new_flat.get("algorithm.kl_coeff") else "harmless"
        if found != "harmless":
            (noted if found == "noted" else breaking).append(f"{key}: {before!r} -> {after!r}")
    if breaking:
        listed = "\n  ".join(breaking)
        raise ValueError(
            f"run {new.get('run_name')!r} has checkpoints made with another config, and these keys "
            f"break it (checkpoint -> now):\n  {listed}\n"
            "Set them back to resume, or choose another run_name to start afresh."
        )
    return noted


def lasting(config: Mapping[str, Any]) -> dict[str, Any]:
    """What of a resolved config no resume may change, by dotted key."""
    flat = _flatten(config)
    return {key: value for key, value in flat.items() if effect(key, config) == "breaks"}


def effect(key: str, config: Mapping[str, Any]) -> Effect:
    """What it means that `key`, dotted, list items by number, has another value in the resolved
    `config` that a run is resumed with. Of a device: another of the same kind."""
    stale = bool(config.get("max_staleness"))
    decays = config.get("optimizer", {}).get("final_lr_fraction", 1.0) != 1.0
    if _matches(key, LEVEL):
        return "noted" if stale else "harmless"
    if _matches(key, LENGTH):
        return "noted" if stale or decays else "harmless"
    if _matches(key, HARMLESS):
        return "harmless"
    return "noted" if _matches(key, NOTED) else "breaks"


def _matches(key: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in patterns)


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Leaves by dotted key; list items count as keys, so that one changed item is one line."""
    items: list[tuple[str, Any]] = []
    if isinstance(value, Mapping) and value:
        items = [(f"{prefix}.{key}" if prefix else str(key), item) for key, item in value.items()]
    elif isinstance(value, (list, tuple)) and value:
        items = [(f"{prefix}.{index}", item) for index, item in enumerate(value)]
    if not items:
        return {prefix: list(value) if isinstance(value, tuple) else value}
    flat: dict[str, Any] = {}
    for key, item in items:
        flat |= _flatten(item, key)
    return flat
