"""May a run go on under a config that is not the one it was started with?

What: `check_resume`, by one table. A key that is not in the table breaks the run: what a run was
optimising, from what data and with which shapes, may not change under one name. What not: reading
either config.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

HARMLESS = (
    "format",  # the config is read under today's names
    "run_name", "base_exp_dir",  # the folder was moved
    "gpu_gb",  # a plan's
    "checkpoint.*", "tracking.*", "evaluation.*", "data.validation*",
    "judge.api_base*", "judge.start_*", "judge.api_key_env", "judge.max_concurrency",
    "judge.timeout_s",
    "judge.max_attempts", "judge.backoff_s", "judge.breaker_*", "judge.max_outage_s",
    "judge.max_failure_rate",
    "optimizer.gradient_checkpointing",
    "*.device",
)  # fmt: skip
"""Do not touch what is learnt."""

NOTED = (
    "world_size", "optimizer.backend", "optimizer.zero_stage", "*batch_size",
    "optimizer.max_tokens_per_micro_batch", "optimizer.max_kept_tokens",
    "policy.attn_implementation", "engine.*",  # same mathematics, other rounding
    "policy.max_prompt_tokens",  # likewise: the sample that is too long says to raise it
    "judge.guided_json",
    "optimizer.learning_rate", "optimizer.final_lr_fraction", "optimizer.warmup_iterations",
    "data.on_bad_row", "data.max_image_side_px",  # how one gets past the row that stopped the run
)  # fmt: skip
"""Allowed, and said aloud: the continuation is no longer the run that would have been."""

LENGTH = ("num_iterations", "num_epochs")
"""Harmless under a constant learning rate; one that decays falls along another line."""

SINCE = {"max_staleness": 0}
"""Keys that older checkpoints lack, and how those runs behaved."""

_ABSENT = "(absent)"


def check_resume(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Compare the checkpoint's resolved config with today's; returns the changes worth a line.

    Raises ValueError with every differing key that breaks the run, old and new value, and the way
    out.
    """
    old_flat, new_flat = _flatten(old), _flatten(new)
    decays = new_flat.get("optimizer.final_lr_fraction", 1.0) != 1.0
    harmless, allowed = (HARMLESS, NOTED + LENGTH) if decays else (HARMLESS + LENGTH, NOTED)
    keys = [*old_flat, *(key for key in new_flat if key not in old_flat)]
    breaking: list[str] = []
    noted: list[str] = []
    for key in keys:
        before = old_flat.get(key, SINCE.get(key, _ABSENT))
        after = new_flat.get(key, _ABSENT)
        if before == after or _matches(key, harmless):
            continue
        line = f"{key}: {before!r} -> {after!r}"
        (noted if _matches(key, allowed) else breaking).append(line)
    if breaking:
        listed = "\n  ".join(breaking)
        raise ValueError(
            f"run {new.get('run_name')!r} has checkpoints made with another config, and these keys "
            f"break it (checkpoint -> now):\n  {listed}\n"
            "Set them back to resume, or choose another run_name to start afresh."
        )
    return noted


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
