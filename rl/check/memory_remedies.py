"""Names what does not fit the GPUs, and the keys that make it smaller. GB is 1e9 bytes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from rl import build
from rl.api.plug import PlacedConfig
from rl.build import Resolved
from rl.check.compatibility import RANKS_OF_A_NODE, plug_problems
from rl.config.schema import RunConfig
from rl.memory import footprint, memory_plan
from rl.memory.memory_plan import PHASES, InferenceEngine, Plan, Sizes
from rl.ranks import placement

SHARE = "engine.gpu_memory_utilization"
CACHE = "engine.kv_cache_memory_mb"
WORTH_GB = 0.05
"""A key that saves less is not named."""

Changes = Mapping[str, Any]
"""Config key -> value, as on the command line."""
SizeOf = Callable[[str], float]
"""CUDA device, as a config names it -> GB."""


def memory_problems(resolved: Resolved, gpu_gb: float, size_of: SizeOf | None = None) -> list[str]:
    """What keeps the run from fitting its GPUs; [] also where the sizes are unknown.

    `gpu_gb`: the policy's GPU; `size_of`: the others (None: the same).
    """
    sizes = footprint.gpu_sizes(resolved)
    if sizes is None:
        return []
    found = [
        *_limit_problems(resolved, sizes),
        *_elsewhere_problems(sizes, gpu_gb, size_of or (lambda device: gpu_gb)),
    ]
    needed: Changes = {}
    if sizes.engine is not None and sizes.engine.starves(gpu_gb):
        needed, problem = _engine_problem(sizes.engine, gpu_gb)
        found.append(problem)
        if not needed:
            return found
    enough = _changed(resolved, needed)
    if _planned(enough, gpu_gb).peak_gb > gpu_gb:
        found.append(_plan_problem(enough, gpu_gb, needed))
    return found


def _limit_problems(resolved: Resolved, sizes: Sizes) -> Iterator[str]:
    """Limits below the weights alone; above them a batch is halved until it fits."""
    claims = build.claims(resolved)
    stated = footprint.policy_device(resolved)
    own = "cuda:0" if stated == "auto" else stated
    if placement.problems(claims, [own], machine=None):
        return  # `compatibility.py` reports it
    engine_gb = 0.0 if sizes.engine is None else sizes.engine.weights_gb
    weights_gb = {model.name: model.weights_gb for model in sizes.frozen}
    ranks = sizes.world_size if sizes.zero_stage == 3 else 1
    weights_gb["policy"] = sizes.weights_gb / ranks + engine_gb
    for device, limit_gb in placement.limits_gb(claims, own).items():
        there = [c.key for c in claims if placement.resolve_device(c.device, own) == device]
        wanted_gb = sum(weights_gb[key] for key in there)
        if wanted_gb > limit_gb:
            yield (
                f"{there[0]}.max_memory_gb: {limit_gb:g} GB for {' and '.join(there)} on {device}, "
                f"whose weights alone are {wanted_gb:.1f} GB; raise it, or drop it"
            )


def _elsewhere_problems(sizes: Sizes, gpu_gb: float, size_of: SizeOf) -> Iterator[str]:
    for device, wanted_gb in memory_plan.plan(sizes, gpu_gb).elsewhere.items():
        if device.startswith("cuda:") and wanted_gb > size_of(device):
            names = [m.name for m in sizes.frozen if m.device == device]
            want = "wants" if len(names) == 1 else "want"
            yield (
                f"{names[0]}.device: {' and '.join(names)} {want} {wanted_gb:.1f} GB of {device}, "
                f"which has {size_of(device):g}; give each a device of its own, a smaller "
                "batch_size, or a larger GPU"
            )


def _engine_problem(engine: InferenceEngine, gpu_gb: float) -> tuple[Changes, str]:
    """(what lets it start, {} if nothing does; what is wrong)."""
    if engine.cache_gb is not None:
        least_mb = math.ceil(round(engine.cache_of_gb(1) * 1e9) / 2**20)
        return {CACHE: least_mb}, (
            f"{CACHE}: {engine.cache_gb * 1e9 / 2**20:g} MiB hold no completion of "
            f"{engine.longest_tokens} tokens, prompt included; at least {least_mb} are needed"
        )
    claimed_gb = engine.claimed_gb(gpu_gb)
    problem = f"{SHARE}: {engine.share} of {gpu_gb:g} GB is {claimed_gb:.1f} GB, and "
    if claimed_gb <= engine.weights_gb:
        problem += f"its weights alone are {engine.weights_gb:.1f} GB"
    else:
        problem += (
            f"beside its weights ({engine.weights_gb:.1f} GB) and workspace "
            f"({engine.workspace_gb(gpu_gb):.1f} GB) there is no room for one completion of "
            f"{engine.longest_tokens} tokens, prompt included"
        )
    least = _least_share(engine, gpu_gb)
    if least <= 1:
        return {SHARE: least}, f"{problem}; at least {least:g} is needed ('auto': what it needs)"
    return {}, (
        f"{problem}; no share works, it wants {engine.least_gb(gpu_gb):.1f} GB: take a larger GPU, "
        "a smaller policy.model_path, or engine.dtype 'bfloat16' if it is wider"
    )


def _least_share(engine: InferenceEngine, gpu_gb: float) -> float:
    """The least with which it starts, in hundredths; above 1 if the whole GPU is not enough."""
    share = math.ceil(100 * engine.least_gb(gpu_gb) / gpu_gb) / 100
    return share + 0.01 if replace(engine, share=share).starves(gpu_gb) else share


def _plan_problem(resolved: Resolved, gpu_gb: float, needed: Changes) -> str:
    """`needed`: the values in `resolved` that are not the config's own."""
    plan = _planned(resolved, gpu_gb)
    phase = max(PHASES, key=plan.total_gb)
    beside = "".join(f" (under {_written(key, value)})" for key, value in needed.items())
    hints, left_gb = _hints(resolved, gpu_gb)
    named = ", ".join(
        f"{_written(key, value)} ({saved_gb:.1f} GB less)"
        for key, (value, saved_gb) in hints.items()
    )
    advice = f"this fits: {named}"
    if left_gb > 0:
        advice = f"{left_gb:.1f} GB too much even with {named}" if named else "no key of it helps"
        advice += "; take larger GPUs, or a smaller model"
    return (
        f"memory{beside}: DOES NOT FIT by {plan.peak_gb - gpu_gb:.1f} GB: {plan.peak_gb:.1f} GB of "
        f"{gpu_gb:g} in phase {phase!r}; {advice}"
    )


def _hints(resolved: Resolved, gpu_gb: float) -> tuple[dict[str, tuple[Any, float]], float]:
    """({key: (value, GB that it saves in the phase where it saves most)}, GB still over): one key
    after the other, the cheapest first, until the plan fits."""
    hints: dict[str, tuple[Any, float]] = {}
    plan, allowed = _planned(resolved, gpu_gb), set(plug_problems(resolved))
    for key, value in _candidates(resolved, gpu_gb):
        if plan.peak_gb <= gpu_gb:
            break
        trial = _changed(resolved, {name: hint for name, (hint, _) in hints.items()} | {key: value})
        smaller = _planned(trial, gpu_gb)
        full = [phase for phase in PHASES if plan.total_gb(phase) > gpu_gb]
        saved_gb = max(plan.total_gb(phase) - smaller.total_gb(phase) for phase in full)
        starves = smaller.inference is not None and smaller.inference.starves(gpu_gb)
        moved_gb = sum(smaller.elsewhere.values()) - sum(plan.elsewhere.values())
        is_right = not starves and moved_gb <= gpu_gb and set(plug_problems(trial)) <= allowed
        if is_right and saved_gb > WORTH_GB and smaller.peak_gb <= plan.peak_gb:
            hints[key] = value, saved_gb + hints.pop(key, (None, 0.0))[1]
            plan = smaller
    if plan.peak_gb <= gpu_gb:
        for key in list(hints):  # a large saving may make those before it needless
            others = {name: hint for name, (hint, _) in hints.items() if name != key}
            if _planned(_changed(resolved, others), gpu_gb).peak_gb <= gpu_gb:
                del hints[key]
    return hints, plan.peak_gb - gpu_gb


def _candidates(resolved: Resolved, gpu_gb: float) -> Iterator[tuple[str, Any]]:
    """Keys to try in this order: what costs the least speed comes first."""
    config, optimizer = resolved.config, resolved.config.optimizer
    sizes = _known(resolved)
    engine = sizes.engine
    plan = _planned(resolved, gpu_gb)
    least = math.inf
    if engine is not None and engine.share is not None and engine.cache_gb is None:
        least = _least_share(engine, gpu_gb)
        assert plan.engine is not None
        over_gb = max(map(plan.total_gb, plan.engine.phases)) - gpu_gb
        fitting = math.floor(100 * (engine.share - over_gb / gpu_gb)) / 100
        if least <= fitting < engine.share:
            yield SHARE, fitting
    if engine is not None and engine.residency == "resident":
        yield "engine.residency", "sleep"
    if optimizer.gradient_checkpointing is False:
        yield "optimizer.gradient_checkpointing", "mlp"
    if optimizer.gradient_checkpointing is not True:
        yield "optimizer.gradient_checkpointing", True
    yield "optimizer.max_kept_tokens", 0
    shortest = sizes.prompt_tokens + sizes.completion_tokens
    if shortest < optimizer.max_tokens_per_micro_batch:
        yield "optimizer.max_tokens_per_micro_batch", shortest
    savings = [
        (f"{plug.key}.{saving.key}", saving)
        for plug in resolved.model_runners
        for saving in plug.cls.savings(plug.config)
    ]
    yield from ((key, saving.value) for key, saving in savings if saving.exact)
    if optimizer.backend == "deepspeed" and config.world_size > 1:
        # Under stage 3 full fine-tuning has no reference at hand.
        for stage in range(optimizer.zero_stage + 1, 3 if sizes.reads_reference else 4):
            yield "optimizer.zero_stage", stage
    if least < math.inf:
        yield SHARE, least
    yield from ((key, saving.value) for key, saving in savings if not saving.exact)
    renderer = resolved.renderer.config
    movable = isinstance(renderer, PlacedConfig) and renderer.device == "auto"
    if movable and 2 * config.world_size <= RANKS_OF_A_NODE:
        yield "renderer.device", f"cuda:+{config.world_size}"


def _planned(resolved: Resolved, gpu_gb: float) -> Plan:
    return memory_plan.plan(_known(resolved), gpu_gb)


def _known(resolved: Resolved) -> Sizes:
    sizes = footprint.gpu_sizes(resolved)
    assert sizes is not None, "no key is tried where they are unknown"
    return sizes


def _changed(resolved: Resolved, changes: Changes) -> Resolved:
    """The config with these values in it, its plugins read again."""
    if not changes:
        return resolved
    values = resolved.config.model_dump(mode="json")
    for key, value in changes.items():
        *sections, name = key.split(".")
        inner = values
        for section in sections:
            inner = inner[section]
        inner[name] = value
    return build.resolve(RunConfig.model_validate(values))


def _written(key: str, value: Any) -> str:
    """As the command line takes it."""
    return f"{key}={value if isinstance(value, str) else json.dumps(value)}"
