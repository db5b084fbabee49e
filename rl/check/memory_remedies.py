"""Reports what does not fit on the GPUs, and config changes that make it fit. GB is 1e9 bytes."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Mapping
from typing import Any

from rl import build
from rl.build import Resolved
from rl.check import memory_plan
from rl.check.compatibility import RANKS_OF_A_NODE, plugin_problems
from rl.check.memory_plan import PHASES, InferenceEngine, Plan
from rl.config.schema import RunConfig

SHARE = "engine.gpu_memory_utilization"
CACHE = "engine.kv_cache_memory_mb"
SAMPLE_WITH_TRAINER = {"type": "transformers"}
"""The section of an engine that has no weights of its own."""
MIN_SAVING_GB = 0.05
"""Changes that save less are not suggested."""

Changes = Mapping[str, Any]
"""Config key, or name of a section -> its new value."""


def memory_problems(
    resolved: Resolved, gpu_gb: float, size_of: Callable[[str], float] | None = None
) -> list[str]:
    """Why the run does not fit its GPUs; [] also if the sizes are unknown.

    `gpu_gb`: memory of the policy's GPU; `size_of`: memory of another GPU (None: `gpu_gb` for all).
    """
    sizes = memory_plan.gpu_sizes(resolved)
    if sizes is None:
        return []
    problems = []
    for device, needed_gb in memory_plan.plan(sizes, gpu_gb).elsewhere.items():
        size_gb = size_of(device) if size_of else gpu_gb
        if device.startswith("cuda:") and needed_gb > size_gb:
            names = [model.name for model in sizes.frozen if model.device == device]
            problems.append(
                f"{names[0]}.device: {' and '.join(names)} together need {needed_gb:.1f} GB of "
                f"{device}, which has {size_gb:g}; give each a device of its own, a smaller "
                "batch_size, or a larger GPU"
            )
    needed: Changes = {}
    if sizes.engine is not None and sizes.engine.lacks_room(gpu_gb):
        needed, problem = _engine_problem(sizes.engine, gpu_gb, engine_dtype(resolved))
        problems.append(problem)
        if not needed:
            return problems
    plan = _planned(resolved, needed, gpu_gb)
    if plan is not None and plan.peak_gb > gpu_gb:
        problems.append(_plan_problem(resolved, plan, gpu_gb, needed))
    return problems


def engine_dtype(resolved: Resolved) -> str:
    """Dtype of the inference engine's weights."""
    memory_config = resolved.engine.cls.memory(resolved.engine.config)
    return str((memory_config and memory_config.dtype) or resolved.policy.config.dtype)


def _engine_problem(engine: InferenceEngine, gpu_gb: float, dtype: str) -> tuple[Changes, str]:
    """(changes with which the engine can start, or {} if none helps; the error message)."""
    key, value = SHARE, engine.share
    needed: str | int = "auto"
    if engine.cache_gb is not None:
        key, value = CACHE, round(engine.cache_gb * 1e9 / 2**20)
        needed = math.ceil(round(engine.cache_of_gb(1) * 1e9) / 2**20)
    problem = (
        f"{key}: with {value} the engine takes {engine.claimed_gb(gpu_gb):.1f} GB of {gpu_gb:g}, "
        f"and it needs {engine.least_gb(gpu_gb):.1f} GB: weights ({engine.weights_gb:.1f} GB), "
        f"workspace ({engine.workspace_gb(gpu_gb):.1f} GB) and a cache for one completion of "
        f"{engine.longest_tokens} tokens, prompt included; "
    )
    if engine.least_gb(gpu_gb) <= gpu_gb:
        return {key: needed}, f"{problem}set {key}={needed}"
    others = ", or engine.dtype=bfloat16" * (dtype == "float32")
    return {}, f"{problem}use a larger GPU, a smaller policy.model_path{others}"


def _plan_problem(resolved: Resolved, plan: Plan, gpu_gb: float, needed: Changes) -> str:
    """The message for a plan that does not fit. `needed`: changes that are required anyway."""
    hints, left_gb = _hints(resolved, plan, gpu_gb, needed)
    pairs = ", ".join(_written(key, value) for key, value in hints.items())
    advice = f"this fits: {pairs}"
    if left_gb > 0:
        advice = f"{left_gb:.1f} GB too much even with {pairs}" if pairs else "no config key helps"
        advice += "; use larger GPUs, or a smaller model"
    suffix = "".join(f" (under {_written(key, value)})" for key, value in needed.items())
    return (
        f"memory{suffix}: DOES NOT FIT by {plan.peak_gb - gpu_gb:.1f} GB: {plan.peak_gb:.1f} GB of "
        f"{gpu_gb:g} in phase {max(PHASES, key=plan.total_gb)!r}; {advice}"
    )


def _hints(resolved: Resolved, plan: Plan, gpu_gb: float, needed: Changes) -> tuple[Changes, float]:
    """({key: value}, GB still missing). Tries each remedy on top of the earlier ones until the plan
    fits."""
    hints: dict[str, Any] = {}
    for key, value in _remedies(resolved):
        if plan.peak_gb <= gpu_gb:
            break
        smaller = _planned(resolved, {**needed, **hints, key: value}, gpu_gb)
        if smaller is None or smaller.peak_gb > plan.peak_gb:
            continue
        full = [phase for phase in PHASES if plan.total_gb(phase) > gpu_gb]
        saved_gb = max(plan.total_gb(phase) - smaller.total_gb(phase) for phase in full)
        moved_gb = sum(smaller.elsewhere.values()) - sum(plan.elsewhere.values())
        if saved_gb > MIN_SAVING_GB and moved_gb <= gpu_gb:
            replaced = {key} | {name for name in hints if name.startswith(f"{key}.")}
            hints = {name: hints[name] for name in hints if name not in replaced}
            hints[key], plan = value, smaller
    for key in list(hints) if plan.peak_gb <= gpu_gb else ():
        # A large saving may make earlier changes unnecessary.
        others = {name: value for name, value in hints.items() if name != key}
        fewer = _planned(resolved, {**needed, **others}, gpu_gb)
        if fewer is not None and fewer.peak_gb <= gpu_gb:
            hints = others
    return hints, plan.peak_gb - gpu_gb


def _remedies(resolved: Resolved) -> list[tuple[str, Any]]:
    """(key, value) pairs in the order in which they are tried, the cheapest for the user first:
    slower training, then a slow engine, then settings that change pictures, then more GPUs.
    `_hints` skips those that the config rejects or that save nothing."""
    sizes = memory_plan.gpu_sizes(resolved)
    assert sizes is not None, "no remedy is tried if the sizes are unknown"
    savings = [
        (f"{plugin.key}.{saving.key}", saving)
        for plugin in resolved.model_runners
        for saving in plugin.cls.savings(plugin.config)
    ]
    # With stage 3, full fine-tuning has no reference policy.
    stages = (1, 2) if sizes.reads_reference else (1, 2, 3)
    ranks = resolved.config.world_size
    shortest = sizes.prompt_tokens + sizes.completion_tokens
    return [
        (SHARE, "auto"),
        ("engine.residency", "sleep"),
        ("optimizer.gradient_checkpointing", "mlp"),
        ("optimizer.gradient_checkpointing", True),
        ("optimizer.max_kept_tokens", 0),
        ("optimizer.max_tokens_per_micro_batch", shortest),
        *((key, saving.value) for key, saving in savings if saving.exact),
        *(("optimizer.zero_stage", stage) for stage in stages),
        # Sampling takes minutes instead of seconds. This replaces the whole section, because the
        # engine does not know vLLM's other keys.
        ("engine", SAMPLE_WITH_TRAINER),
        *((key, saving.value) for key, saving in savings if not saving.exact),
        *([("renderer.device", f"cuda:+{ranks}")] if 2 * ranks <= RANKS_OF_A_NODE else []),
    ]


def _planned(resolved: Resolved, changes: Changes, gpu_gb: float) -> Plan | None:
    """The plan with these values; None if the config rejects them or they cause a new problem."""
    values = resolved.config.model_dump(mode="json")
    for key, value in changes.items():
        *sections, name = key.split(".")
        section = values
        for part in sections:
            section = section[part]
        section[name] = value
    try:
        changed = build.resolve(RunConfig.model_validate(values)) if changes else resolved
    except ValueError:  # this engine or renderer has no such key
        return None
    if not set(plugin_problems(changed)) <= set(plugin_problems(resolved)):
        return None
    plan = memory_plan.footprint(changed, gpu_gb)
    lacks_room = plan and plan.inference and plan.inference.lacks_room(gpu_gb)
    return None if lacks_room else plan


def _written(key: str, value: Any) -> str:
    """The change as an argument of the command line, quoted for the shell."""
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    return shlex.quote(f"{key}={text}")
