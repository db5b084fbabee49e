"""Decides which keys of a run's config may change when it resumes: those listed here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Set
from fnmatch import fnmatchcase
from typing import Any, Literal

Effect = Literal["harmless", "noted", "breaks"]
"""harmless: training computes the same (the same bits where a resume does); noted: allowed and
logged, but the run's results change; breaks: refused."""

HARMLESS = (
    "format",  # another format is refused on loading
    "run_name", "base_exp_dir",  # the folder was moved
    "gpu_gb",  # read only by the memory plan
    "checkpoint.*", "tracking.*",
    # These change the meaning of the held-out curve; nothing is trained on it.
    "evaluation.*", "data.validation.*",
    # These say where the judge is and how long to wait for it, not how it grades.
    "judge.api_base*", "judge.start_command*", "judge.start_timeout_s", "judge.api_key_env",
    "judge.max_concurrency", "judge.timeout_s", "judge.backoff_s", "judge.breaker_failures",
    "judge.breaker_pause_s", "judge.max_outage_s", "judge.max_failure_rate", "judge.revision",
    "judge.audit*", "judge.attack_max_gain",
    "max_render_failure_rate", "hang_limit_s",
    "render_pool*",  # workers and ranks draw the same bits
    "optimizer.gradient_checkpointing",  # runs the same kernels on the same numbers twice
    "policy.max_kept_pictures",
    "policy.lora.init_seed", "policy.from_run",  # read before the first iteration
    "engine.residency",  # after waking, its weights are checked to be unchanged
    "*.device",  # but see `check_resume`
)  # fmt: skip

SYNC_POINTS = (
    "checkpoint.save_every_n_iterations", "checkpoint.push_to_hub_every_n_iterations",
    "evaluation.every_n_iterations", "data.validation",  # the whole key: the list is empty
)  # fmt: skip
"""Looked up before `HARMLESS`. Harmless on-policy. With `max_staleness: 1`, a rollout starts only
when a checkpoint or evaluation is done, so these keys decide which iterations train on stale
completions."""

LENGTH = ("num_iterations", "num_epochs")
"""Harmless on-policy with a constant learning rate. The length sets the speed of a decay and, with
`max_staleness: 1`, the iteration after which no rollout starts early."""

NOTED = (
    # The same mathematics, other rounding. (Under updates_per_iteration > 1 each rank splits its
    # prompts into steps, so with another world_size a step has other groups.)
    "world_size", "optimizer.backend", "optimizer.zero_stage", "*batch_size", "*.max_memory_gb",
    "optimizer.max_tokens_per_micro_batch", "optimizer.max_kept_tokens", "bare_arm",
    "policy.attn_implementation", "engine.*",
    # Changed to get past what stopped the run: a sample, row or question that was too long, or a
    # reply that could not be read.
    "policy.max_prompt_tokens", "data.on_bad_row", "data.max_image_side_px",
    "renderer.max_pictures",
    "data.train.*.picture_check",
    "judge.guided_json", "judge.max_attempts", "judge.max_tokens", "judge.image_side_px",
    # Tuned by hand.
    "optimizer.learning_rate", "optimizer.final_lr_fraction", "optimizer.warmup_iterations",
)  # fmt: skip

VALUES_OF_OLD_RUNS = {
    "max_staleness": 0,
    "policy.thought": None,
    "judge.unreadable": "ungraded",
    "algorithm.kl_reference": "start",  # where it started from an adapter: see `run/start_adapter`
}
"""Key that older checkpoints lack -> the value that describes how those runs trained."""

_ABSENT = "(absent)"


def check_resume(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Compare the checkpoint's resolved config with the current one; returns the noted changes.

    Raises ValueError with every changed key that breaks the run, its two values, and the remedy.
    """
    in_both = old.get("rewards", {}).keys() & new.get("rewards", {}).keys()
    changed = (_held_out_only(old) | _held_out_only(new)) - in_both  # nothing is trained on them
    old_flat, new_flat = _flatten(_without(old, changed)), _flatten(_without(new, changed))
    breaking: list[str] = []
    noted: list[str] = []
    for key in old_flat | new_flat:
        before = old_flat.get(key, VALUES_OF_OLD_RUNS.get(key, _ABSENT))
        after = new_flat.get(key, _ABSENT)
        consequence = effect(key, new)
        if consequence == "harmless" and key.endswith(".device") and "cpu" in (before, after):
            consequence = "noted"  # other kernels
        if key == "algorithm.zero_spread_groups" and "keep" not in (before, after):
            # 'drop' and 'kl_only' differ only in a KL term.
            consequence = consequence if new_flat.get("algorithm.kl_coeff") else "harmless"
        if before != after and consequence != "harmless":
            (noted if consequence == "noted" else breaking).append(
                f"{key}: {before!r} -> {after!r}"
            )
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
    flat = _flatten(_without(config, _held_out_only(config)))
    return {key: value for key, value in flat.items() if effect(key, config) == "breaks"}


def _held_out_only(config: Mapping[str, Any]) -> set[str]:
    rewards = config.get("rewards", {})
    return {name for name, section in rewards.items() if section.get("held_out_only")}


def _without(config: Mapping[str, Any], names: Set[str]) -> dict[str, Any]:
    """`config` without the rewards `names`."""
    rewards = {name: each for name, each in config.get("rewards", {}).items() if name not in names}
    return {**config, "rewards": rewards}


def effect(key: str, config: Mapping[str, Any]) -> Effect:
    """The effect of resuming with another value of `key` (dotted, list items by number). `config`:
    the resolved new one. For a device key: another device of the same kind."""

    def is_in(patterns: tuple[str, ...]) -> bool:
        return any(fnmatchcase(key, pattern) for pattern in patterns)

    stale = bool(config.get("max_staleness"))
    decays = config.get("optimizer", {}).get("final_lr_fraction", 1.0) != 1.0
    judge = config.get("judge", {})
    if key.startswith("judge.") and not (judge.get("api_base") or judge.get("start_command")):
        return "harmless"  # no judge is asked
    key = re.sub(r"^rewards\.[^.]+\.judge\.", "judge.", key)  # a reward's own judge
    if is_in(SYNC_POINTS):
        return "noted" if stale else "harmless"
    if is_in(LENGTH):
        return "noted" if stale or decays else "harmless"
    if is_in(HARMLESS):
        return "harmless"
    return "noted" if is_in(NOTED) else "breaks"


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value. Items of lists have keys, too, so that a changed item is one line."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    flat: dict[str, Any] = {}
    for key, item in items:
        flat |= _flatten(item, f"{prefix}.{key}" if prefix else str(key))
    return flat or {prefix: list(value) if isinstance(value, tuple) else value}
