"""Decides which config changes a run survives when it resumes: those of the keys listed here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal

Effect = Literal["harmless", "noted", "breaks"]
"""harmless: training computes the same, bitwise where it is exact; noted: allowed and logged, but
the run continues differently than it would have; breaks: refused."""

HARMLESS = (
    "format",  # another one is refused
    "run_name", "base_exp_dir",  # the folder was moved
    "gpu_gb",  # a plan's
    "checkpoint.*", "tracking.*",
    # The held-out curve goes on under another meaning; nothing is trained on it.
    "evaluation.*", "data.validation.*",
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
"""Before `HARMLESS`: harmless where rollouts are on-policy. Under `max_staleness: 1` they start
level at every checkpoint and held-out run, so these decide which iterations learn from stale
completions."""

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

SINCE = {"max_staleness": 0, "policy.thought": None}
"""Keys that older checkpoints lack, and how those runs behaved."""

_ABSENT = "(absent)"


def check_resume(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Compare the checkpoint's resolved config with today's; returns the changes worth a line.

    Raises ValueError with every differing key that breaks the run, old and new value, and the way
    out.
    """
    old_flat, new_flat = _flatten(old), _flatten(new)
    breaking: list[str] = []
    noted: list[str] = []
    for key in old_flat | new_flat:
        before = old_flat.get(key, SINCE.get(key, _ABSENT))
        after = new_flat.get(key, _ABSENT)
        found = effect(key, new)
        if found == "harmless" and key.endswith(".device") and "cpu" in (before, after):
            found = "noted"  # other kernels
        if key == "algorithm.zero_spread_groups" and "keep" not in (before, after):
            # 'drop' and 'kl_only' differ by a KL.
            found = found if new_flat.get("algorithm.kl_coeff") else "harmless"
        if before != after and found != "harmless":
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
    """The part of a resolved config that no resume may change, by dotted key."""
    flat = _flatten(config)
    return {key: value for key, value in flat.items() if effect(key, config) == "breaks"}


def effect(key: str, config: Mapping[str, Any]) -> Effect:
    """What it means that `key`, dotted, list items by number, has another value in the resolved
    `config` that a run is resumed with. Of a device: another of the same kind."""

    def is_in(patterns: tuple[str, ...]) -> bool:
        return any(fnmatchcase(key, pattern) for pattern in patterns)

    stale = bool(config.get("max_staleness"))
    decays = config.get("optimizer", {}).get("final_lr_fraction", 1.0) != 1.0
    if is_in(LEVEL):
        return "noted" if stale else "harmless"
    if is_in(LENGTH):
        return "noted" if stale or decays else "harmless"
    if is_in(HARMLESS):
        return "harmless"
    return "noted" if is_in(NOTED) else "breaks"


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Leaves by dotted key; list items count as keys, so that one changed item is one line."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    flat: dict[str, Any] = {}
    for key, item in items:
        flat |= _flatten(item, f"{prefix}.{key}" if prefix else str(key))
    return flat or {prefix: list(value) if isinstance(value, tuple) else value}
