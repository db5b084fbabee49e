"""What a config would do, without doing it: `python -m rl.simple_launch --check config.jsonnet`.

`problems` is asked quietly before every launch. No torch, no vLLM, no GPU: seconds on a laptop.
"""

from __future__ import annotations

import asyncio
import math
import shlex
from collections.abc import Iterable, Sequence

from rl import build
from rl.config.schema import ConfigError, RunConfig, listed
from rl.judge.endpoint import resolve_api_bases
from rl.preflight import compatibility, footprint, host_memory, memory_plan
from rl.preflight.ask_judge import Heard, ask_judge
from rl.preflight.disk import disk_lines
from rl.preflight.dry_run import dry_problems, tried
from rl.preflight.host_memory import HostPlan
from rl.preflight.leaving import leaving_lines
from rl.preflight.memory_plan import PHASES, Plan
from rl.preflight.memory_remedies import memory_problems
from rl.preflight.no_effect import doubtful, no_effect
from rl.preflight.resume import check_resume
from rl.preflight.run_folder import folder_problems
from rl.preflight.this_machine import machine_lines, machine_problems
from rl.ranks import placement
from rl.record.checkpoint import find, read_state
from rl.record.scrub import remember, scrubbed


def problems(config: RunConfig) -> list[str]:
    """Everything that keeps this config from running, each with its key and remedy."""
    try:
        resolved = build.resolve(config)
    except ConfigError as error:
        return list(error.problems)
    if unusable := folder_problems(config.run_dir):
        return unusable
    found = compatibility.compatibility_problems(resolved) + _resume(config)[1]
    return found or dry_problems(resolved)


def remarks(config: RunConfig) -> dict[str, list[str]]:
    """Title -> 'key: why', of keys that have no effect or hardly the one that is meant. `problems`
    comes first."""
    return _remarks(build.resolve(config))


def _remarks(resolved: build.Resolved) -> dict[str, list[str]]:
    found = {
        "set, and without effect here": no_effect(resolved),
        "set, and hardly meant": doubtful(resolved),
    }
    return {title: lines for title, lines in found.items() if lines}


def problems_here(
    config: RunConfig,
    machine: placement.Machine,
    num_ranks: int,
    host_gb: float | None = None,
) -> list[str]:
    """What this machine lacks, and what does not fit the GPUs of `machine`, on which `num_ranks`
    ranks start, or its memory of `host_gb` (None: unknown); [] where the policy lies on no GPU.
    `problems` comes first."""
    resolved = build.resolve(config)
    if lacking := machine_problems(resolved, starts=True):
        return lacking
    own_gb = own_gpu_gb(resolved, machine, num_ranks)
    if own_gb is None:
        return []
    sizes_gb, owns = _cuda_gb(machine), _own_devices(resolved, num_ranks)

    def size_of(device: str) -> float:
        places = [placement.resolve_device(device, own) for own in owns]
        return min((sizes_gb[place] for place in places if place in sizes_gb), default=math.inf)

    found = memory_problems(resolved, own_gb, size_of)
    return found or _host_problems(resolved, own_gb, num_ranks, host_gb)


def _host_problems(
    resolved: build.Resolved, gpu_gb: float, num_ranks: int, host_gb: float | None
) -> list[str]:
    planned = footprint.host_footprint(resolved, gpu_gb, num_ranks)
    return [] if planned is None else host_memory.host_problems(planned, num_ranks, host_gb)


def own_gpu_gb(
    resolved: build.Resolved, machine: placement.Machine, num_ranks: int
) -> float | None:
    """The smallest GPU of `machine` on which a rank's policy lies; None where none does."""
    sizes_gb, owns = _cuda_gb(machine), _own_devices(resolved, num_ranks)
    return min((sizes_gb[own] for own in owns if own in sizes_gb), default=None)


def _own_devices(resolved: build.Resolved, num_ranks: int) -> list[str]:
    stated = footprint.policy_device(resolved)
    return [f"cuda:{rank}" if stated == "auto" else stated for rank in range(num_ranks)]


def _cuda_gb(machine: placement.Machine) -> dict[str, float]:
    return {f"cuda:{index}": gb for index, gb in enumerate(machine.cuda_gb)}


def report(config: RunConfig, gpu_gb: float, online: bool = False) -> tuple[str, int]:
    """(what the run would be, exit code: 1 when something is wrong); the last lines say which.
    `online`: with what the judge says when it is asked."""
    try:
        resolved = build.resolve(config)
    except ConfigError as error:
        return _verdict(list(error.problems), [])
    if unusable := folder_problems(config.run_dir):
        return _verdict(unusable, [])
    state, conflicts = _resume(config)
    num_ranks = min(config.world_size, compatibility.RANKS_OF_A_NODE)
    host_gb = host_memory.here_gb() if host_memory.has_gpus() else None
    unfit = memory_problems(resolved, gpu_gb)
    unfit += _host_problems(resolved, gpu_gb, num_ranks, host_gb)
    blocks = {
        f"run {config.run_name} in {config.run_dir}: {state}": [],
        "plugs": _plug_lines(resolved),
        "placement": placement.describe(build.claims(resolved)),
        "batch": _batch_lines(resolved),
        f"memory per GPU, against {gpu_gb:g} GB": _memory_lines(resolved, gpu_gb, unfit),
        f"host memory of a machine with {num_ranks} ranks": _host_lines(
            resolved, gpu_gb, num_ranks, host_gb
        ),
        "judge": _judge_lines(resolved),
        "disk": disk_lines(resolved),
        "this machine": machine_lines(resolved),
        "leaves this machine": leaving_lines(resolved),
    }
    blocks |= _remarks(resolved)
    lines = [line for title, block in blocks.items() for line in (title, *_indented(block))]
    found = [*compatibility.compatibility_problems(resolved), *unfit, *conflicts]
    found += machine_problems(resolved)
    if not found:
        found = dry_problems(resolved)
        keys = [plug.key for plug in tried(resolved) if not plug.cls.__module__.startswith("rl.")]
        if keys:
            lines.append(f"tried on made-up inputs, so that their code has run: {', '.join(keys)}")
    if online and not found:
        heard = _heard(resolved)
        if heard.lines:
            lines += ["judge, asked now", *_indented(heard.lines)]
        found = heard.problems
    last, code = _verdict(found, footprint.unknowns(resolved))
    return "\n".join([*lines, last]), code


def _indented(lines: Iterable[str]) -> Iterable[str]:
    return (f"  {line}" for line in lines)


def _verdict(found: list[str], unknowns: list[str]) -> tuple[str, int]:
    if found:
        return f"{len(found)} wrong\n{listed(found)}", 1
    if unknowns:
        what = " and ".join(unknown.partition(":")[0] for unknown in unknowns)
        return f"no mistake found; whether it fits its GPUs is unknown ({what}: see above)", 0
    return "nothing is wrong", 0


def _plug_lines(resolved: build.Resolved) -> list[str]:
    origins = ("".join(plug.cls.reads_from(plug.config)[:1]) for plug in resolved.plugs)
    return [
        f"{plug.key:<20} {plug.name:<22} {origin}".rstrip()
        for plug, origin in zip(resolved.plugs, origins, strict=True)
    ]


def _batch_lines(resolved: build.Resolved) -> list[str]:
    config, ranks = resolved.config, resolved.config.world_size
    prompts = config.prompts_per_iteration
    completions = prompts * config.generations_per_prompt
    pictures = completions * config.images_per_completion
    if not resolved.renderer.cls.makes_images:
        pictures = 0
    questions = pictures * _questions_per_picture(resolved)

    def row(name: str, count: float) -> str:
        return f"{name:<20} {count:>8g} an iteration {count / ranks:>8g} on each of {ranks} ranks"

    optimizer, group = config.optimizer, footprint.group_tokens(resolved)
    per_update = completions / ranks / optimizer.updates_per_iteration
    kept, why = footprint.kept_tokens(resolved)
    return [
        row("prompts", prompts),
        row("completions", completions),
        row("pictures", pictures),
        row("judge questions", questions),
        f"{'optimiser steps':<20} {optimizer.updates_per_iteration:>8} an iteration, each of "
        f"{per_update:g} completions a rank",
        f"{'forwards':<20} in rows of up to {optimizer.max_tokens_per_micro_batch} tokens; a group "
        f"is {group} at the most",
        f"{'kept for backward':<20} {kept} tokens on each rank, "
        + (f"not all ({why})" if why else "all there can be"),
        f"{'whole run':<20} {_length(resolved)}",
    ]


def _length(resolved: build.Resolved) -> str:
    """Iterations <-> epochs, as far as the number of samples is known."""
    config = resolved.config
    counts = [plug.cls.count(plug.config) for plug in resolved.train]
    prompts = config.prompts_per_iteration
    known = [count for count in counts if count is not None]
    if len(known) < len(counts):
        if config.num_epochs is not None:
            return f"{config.num_epochs:g} epochs; iterations are known once the data is loaded"
        return f"{config.num_iterations} iterations; epochs are known once the data is loaded"
    num_samples = sum(known)
    if not num_samples:
        return "no samples"
    if (config.num_iterations is None) == (config.num_epochs is None):
        return f"{num_samples} samples"
    iterations = build.num_iterations(config, num_samples)
    return (
        f"{iterations} iterations of {prompts} prompts = {iterations * prompts / num_samples:.3g} "
        f"epochs of {num_samples} samples"
    )


def _questions_per_picture(resolved: build.Resolved) -> int:
    return sum(
        plug.cls.num_questions(plug.config)
        for plug in resolved.rewards.values()
        if plug.cls.needs_judge
    )


def _judge_lines(resolved: build.Resolved) -> list[str]:
    config, judge = resolved.config, resolved.config.judge
    per_picture = _questions_per_picture(resolved)
    if not per_picture:
        return ["is not asked"]
    pictures = config.generations_per_prompt * config.images_per_completion
    training = config.prompts_per_iteration * pictures * per_picture
    places = [judge.api_base] if isinstance(judge.api_base, str) else judge.api_base
    where = ", ".join(filter(None, places)) or "the URL that start_command tells"
    lines = [f"{judge.model} at {where}"]
    if judge.start_command:
        lines.append(f"started by the run on each node: {shlex.join(judge.start_command)}")
    lines += [
        f"{name}: {plug.name}, {plug.cls.num_questions(plug.config)} questions a picture"
        for name, plug in resolved.rewards.items()
        if plug.cls.needs_judge
    ]
    lines.append(
        f"{training} questions an iteration: {training * 60} an hour at one iteration a minute; up "
        f"to {judge.max_concurrency * config.world_size} in flight, {judge.max_attempts} tries each"
    )
    if config.evaluation.every_n_iterations:
        draws = resolved.renderer.cls.makes_images
        bare = draws and config.bare_arm != "never"
        cut = config.evaluation.thought_gain and resolved.policy.config.thought is not None
        arms = 1 + bare + config.evaluation.reference_drift + cut
        held_out = config.evaluation.num_samples * config.images_per_completion * per_picture
        every = config.evaluation.every_n_iterations
        own = resolved.policy.cls.starts_as_stock
        once = 2 * held_out if draws and config.evaluation.stock_arm and not own else 0
        lines.append(
            f"held-out run: up to {held_out * arms} more every {every} iterations"
            + (f", and {once} once for the stock arm" if once else "")
        )
    return lines


def _heard(resolved: build.Resolved) -> Heard:
    judge = resolved.config.judge
    if not resolved.needs_judge:
        return Heard(lines=["no reward asks one"])
    if judge.start_command:
        return Heard(lines=["not asked: it is there once the run has started it, and asked then"])
    return asyncio.run(ask_judge(resolved, resolve_api_bases(judge.api_base), wait_s=0.0))


def _memory_lines(resolved: build.Resolved, gpu_gb: float, unfit: Sequence[str]) -> list[str]:
    unknown = [f"unknown: {text}" for text in footprint.unknowns(resolved)]
    planned = footprint.footprint(resolved, gpu_gb)
    if planned is None:
        device = footprint.policy_device(resolved)
        return unknown or [f"not planned: policy.device is {device!r}"]
    lines = _table(planned, PHASES)
    lines += [f"assumed: {text}" for text in planned.assumptions]
    if planned.engine is not None:
        lines.append(memory_plan.engine_line(planned, gpu_gb))
        lines.append(memory_plan.residency_line(planned, gpu_gb))
    return [*lines, *unknown, _room_line(planned, gpu_gb, unfit, unknown)]


def _host_lines(
    resolved: build.Resolved, gpu_gb: float, num_ranks: int, host_gb: float | None
) -> list[str]:
    planned = footprint.host_footprint(resolved, gpu_gb, num_ranks)
    if planned is None:
        return ["not planned: see above"]
    there = "" if host_gb is None else f", of {host_gb:.1f} here"
    return [
        *_table(planned, host_memory.HOST_PHASES),
        f"{planned.peak_gb:.1f} GB at its peak{there}; pages of files that are read come besides",
    ]


def _table(planned: Plan | HostPlan, phases: Sequence[str]) -> list[str]:
    """A line for each part, a column for each phase, and the sums."""
    lines = [f"{'GB':<28}" + "".join(f"{phase:>10}" for phase in phases)]
    for row in planned.rows:
        cells = (f"{row.gb:>10.2f}" if phase in row.phases else f"{'':>10}" for phase in phases)
        lines.append(f"{row.part:<28}" + "".join(cells))
    totals = "".join(f"{planned.total_gb(phase):>10.2f}" for phase in phases)
    return [*lines, f"{'sum':<28}{totals}"]


def _room_line(planned: Plan, gpu_gb: float, unfit: Sequence[str], unknown: Sequence[str]) -> str:
    free_gb = gpu_gb - planned.peak_gb
    if free_gb < 0:
        return f"DOES NOT FIT by {-free_gb:.1f} GB"
    if unfit:
        return f"DOES NOT FIT, though the sum leaves {free_gb:.1f} GB: see below"
    tight = ", which is tight (a tenth should stay free)" if free_gb < gpu_gb / 10 else ""
    fits = "what is known fits" if unknown else "fits"
    return f"{fits} with {free_gb:.1f} GB to spare{tight}"


def _resume(config: RunConfig) -> tuple[str, list[str]]:
    """(state of the run folder in words, what forbids to go on from it)."""
    found = find(config.run_dir, hashes=False)
    if found.problem:
        return "cannot go on", [f"run_name: {found.problem}"]
    if found.path is None:
        recorded = (config.run_dir / "metrics.jsonl").is_file()
        return "starts afresh" + (", and sets aside what is recorded there" * recorded), []
    remember(config.judge.api_key_env)
    today = scrubbed(config.model_dump(mode="json"))
    words = "cannot go on"
    try:
        state = read_state(found.path)
        words = "; ".join((f"goes on after {state['iteration']} iterations", *found.remarks))
        noted = check_resume(state["meta"]["config"], today)
    except ValueError as error:
        return words, [f"run_name: {error}"]
    return words + (f" (changed: {', '.join(noted)})" if noted else ""), []
