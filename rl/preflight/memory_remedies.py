"""Does a config's memory plan fit a GPU, and which keys make it fit? GB is 1e9 bytes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from rl import build
from rl.api.plug import PlacedConfig
from rl.build import Resolved
from rl.config.schema import RunConfig
from rl.preflight import footprint, memory_plan
from rl.preflight.compatibility import RANKS_OF_A_NODE, plug_problems
from rl.preflight.engine_memory import InferenceEngine
from rl.preflight.memory_plan import PHASES, Plan, Sizes
from rl.ranks import placement

SHARE = "engine.gpu_memory_utilization"
CACHE = "engine.kv_cache_memory_mb"
WORTH_GB = 0.05
"""A remedy that saves less is not named."""

Changes = Mapping[str, Any]
"""Config key -> value, as on the command line."""
SizeOf = Callable[[str], float]
"""CUDA device, as a config spells it -> GB."""


def memory_problems(resolved: Resolved, gpu_gb: float, size_of: SizeOf | None = None) -> list[str]:
    """What keeps the run from fitting its GPUs; [] too where nobody knows the sizes.

    `gpu_gb`: the policy's GPU; `size_of`: the others (None: the same).
    """
    sizes = footprint.gpu_sizes(resolved)
    if sizes is None:
        return []
    found = [
        *_limit_problems(resolved, sizes),
        *_elsewhere_problems(sizes, gpu_gb, size_of or (lambda device: gpu_gb)),
    ]
    needed: dict[str, Any] = {}
    if sizes.engine is not None and sizes.engine.starves(gpu_gb):
        needed, problem = _engine_problem(sizes.engine, gpu_gb)
        found.append(problem)
        if not needed:
            return found
    enough = _changed(resolved, needed)
    if _over_gb(enough, gpu_gb):
        found.append(_plan_problem(enough, gpu_gb, needed))
    return found


def _limit_problems(resolved: Resolved, sizes: Sizes) -> Iterator[str]:
    """A limit that not even the weights keep; beyond them a batch is halved until it fits."""
    claims = build.claims(resolved)
    stated = footprint.policy_device(resolved)
    own = "cuda:0" if stated == "auto" else stated
    if placement.problems(claims, [own], machine=None):
        return  # `compatibility.py` says so
    engine_gb = 0.0 if sizes.engine is None else sizes.engine.weights_gb
    weights_gb = {model.name: model.weights_gb for model in sizes.frozen}
    ranks = sizes.world_size if sizes.zero_stage == 3 else 1
    weights_gb["policy"] = sizes.model.params * sizes.bytes_per_weight / 1e9 / ranks + engine_gb
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


def _engine_problem(engine: InferenceEngine, gpu_gb: float) -> tuple[dict[str, Any], str]:
    """(what lets it start, {} if nothing does; what is wrong)."""
    weights = f"its weights alone are {engine.weights_gb:.1f} GB"
    if engine.cache_gb is not None:
        least_mb = math.ceil(round(engine.cache_of_gb(1) * 1e9) / 2**20)
        return {CACHE: least_mb}, (
            f"{CACHE}: {engine.cache_gb * 1e9 / 2**20:g} MiB hold no completion of "
            f"{engine.longest_tokens} tokens, prompt included; at least {least_mb} are needed"
        )
    claimed_gb = engine.claimed_gb(gpu_gb)
    given = f"{SHARE}: {engine.share} of {gpu_gb:g} GB is {claimed_gb:.1f} GB"
    if claimed_gb > engine.weights_gb:
        weights = (
            f"beside its weights ({engine.weights_gb:.1f} GB) and workspace "
            f"({engine.workspace_gb(gpu_gb):.1f} GB) there is no room for one completion of "
            f"{engine.longest_tokens} tokens, prompt included"
        )
    least = _least_share(engine, gpu_gb)
    if least is None:
        return {}, (
            f"{given}, and {weights}; no share works, it wants {engine.least_gb(gpu_gb):.1f} GB: "
            "take a larger GPU, a smaller policy.model_path, or engine.dtype 'bfloat16' if it is "
            "wider"
        )
    return {SHARE: least}, (
        f"{given}, and {weights}; at least {least:g} is needed ('auto': what it needs)"
    )


def _least_share(engine: InferenceEngine, gpu_gb: float) -> float | None:
    """In hundredths; None if not even the whole GPU is enough."""
    shares = (hundredth / 100 for hundredth in range(1, 101))
    return next((s for s in shares if not replace(engine, share=s).starves(gpu_gb)), None)


def _plan_problem(resolved: Resolved, gpu_gb: float, needed: Changes) -> str:
    """`needed`: what is in `resolved` beside the config's own values."""
    plan = _planned(resolved, gpu_gb)
    phase = max(PHASES, key=plan.total_gb)
    beside = "".join(f" (under {_spelled(key, value)})" for key, value in needed.items())
    wanted = (
        f"memory{beside}: DOES NOT FIT by {plan.peak_gb - gpu_gb:.1f} GB: {plan.peak_gb:.1f} GB of "
        f"{gpu_gb:g} in phase {phase!r}; "
    )
    remedies, left_gb = _remedies(resolved, gpu_gb)
    named = ", ".join(
        f"{_spelled(key, value)} ({saved_gb:.1f} GB less)"
        for key, (value, saved_gb) in remedies.items()
    )
    if not left_gb:
        return f"{wanted}this fits: {named}"
    too_much = f"{left_gb:.1f} GB too much even with {named}" if named else "no key of it helps"
    return f"{wanted}{too_much}; take larger GPUs, or a smaller model"


def _remedies(resolved: Resolved, gpu_gb: float) -> tuple[dict[str, tuple[Any, float]], float]:
    """({key: (value, GB that it saves in the phase it helps most)}, GB still over)."""
    chosen: dict[str, tuple[Any, float]] = {}
    best = resolved
    while _over_gb(best, gpu_gb):
        before = _planned(best, gpu_gb)
        for key, value in (*_fitting_share(best, gpu_gb), *_candidates(best, gpu_gb)):
            trial = _changed(best, {key: value})
            saved_gb = _saved_gb(before, _planned(trial, gpu_gb), gpu_gb)
            if saved_gb > WORTH_GB and _starts(trial, resolved, gpu_gb):
                earlier_gb = chosen.pop(key, (None, 0.0))[1]
                chosen[key] = (value, earlier_gb + saved_gb)
                best = trial
                break
        else:
            return chosen, _over_gb(best, gpu_gb)
    for key in list(chosen):  # those before a large one may be for nothing
        others = {name: value for name, (value, _) in chosen.items() if name != key}
        trial = _changed(resolved, others)
        if not _over_gb(trial, gpu_gb) and _starts(trial, resolved, gpu_gb):
            del chosen[key]
    return chosen, 0.0


def _starts(trial: Resolved, resolved: Resolved, gpu_gb: float) -> bool:
    """Whether the trial makes nothing wrong that was not, and its engine has room (under ZeRO-3 it
    has a vision tower of its own)."""
    engine = _known(trial).engine
    starves = engine is not None and engine.starves(gpu_gb)
    return not starves and set(plug_problems(trial)) <= set(plug_problems(resolved))


def _saved_gb(before: Plan, after: Plan, gpu_gb: float) -> float:
    """The most saved in a phase that does not fit; 0 where another phase gets worse."""
    full = [phase for phase in PHASES if before.total_gb(phase) > gpu_gb]
    worse = any(after.total_gb(p) > max(before.total_gb(p), gpu_gb) for p in PHASES)
    return 0.0 if worse else max(before.total_gb(p) - after.total_gb(p) for p in full)


def _fitting_share(resolved: Resolved, gpu_gb: float) -> Iterator[tuple[str, Any]]:
    """The largest share of the engine's that lets all fit, if there is one."""
    sizes = _known(resolved)
    engine = sizes.engine
    if engine is None or engine.share is None or engine.cache_gb is not None:
        return
    least = _least_share(engine, gpu_gb) or math.inf
    for hundredth in range(math.ceil(engine.share * 100) - 1, 0, -1):
        smaller = replace(sizes, engine=replace(engine, share=hundredth / 100))
        if hundredth / 100 < least:
            return
        if memory_plan.plan(smaller, gpu_gb).peak_gb <= gpu_gb:
            yield SHARE, hundredth / 100
            return


def _candidates(resolved: Resolved, gpu_gb: float) -> Iterator[tuple[str, Any]]:
    """Keys to try in this order: what costs the least speed comes first."""
    config, optimizer = resolved.config, resolved.config.optimizer
    sizes = _known(resolved)
    stated = resolved.engine.cls.memory(resolved.engine.config)
    if stated is not None and stated.residency == "resident":
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
        last = 2 if sizes.reads_reference else 3
        for stage in range(optimizer.zero_stage + 1, last + 1):
            yield "optimizer.zero_stage", stage
    engine = sizes.engine
    if engine is not None and engine.share is not None and engine.cache_gb is None:
        least = _least_share(engine, gpu_gb)
        if least is not None and least < engine.share:
            yield SHARE, least
    yield from ((key, saving.value) for key, saving in savings if not saving.exact)
    alone_gb = sum(row.gb for row in _planned(resolved, gpu_gb).rows if "renderer" in row.part)
    renderer = resolved.renderer.config
    movable = isinstance(renderer, PlacedConfig) and renderer.device == "auto"
    if movable and alone_gb <= gpu_gb and 2 * config.world_size <= RANKS_OF_A_NODE:
        yield "renderer.device", f"cuda:+{config.world_size}"


def _over_gb(resolved: Resolved, gpu_gb: float) -> float:
    return max(0.0, _planned(resolved, gpu_gb).peak_gb - gpu_gb)


def _planned(resolved: Resolved, gpu_gb: float) -> Plan:
    return memory_plan.plan(_known(resolved), gpu_gb)


def _known(resolved: Resolved) -> Sizes:
    sizes = footprint.gpu_sizes(resolved)
    assert sizes is not None, "no remedy is sought where they are unknown"
    return sizes


def _changed(resolved: Resolved, changes: Changes) -> Resolved:
    """The config with these values in it, its plugs read again."""
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


def _spelled(key: str, value: Any) -> str:
    """As the command line takes it."""
    return f"{key}={value if isinstance(value, str) else json.dumps(value)}"
