"""Reports what a config would do, without doing it: `rl check config.jsonnet`.

Every launch calls `problems` first. It needs no torch, no vLLM, no GPU, and takes seconds.
"""

from __future__ import annotations

import asyncio
import math
import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from rl import build
from rl.check import compatibility
from rl.check.ask_judge import ask_judge
from rl.check.disk import disk_line
from rl.check.dry_run import dry_problems, tried
from rl.check.fetch import hub_models, is_offline
from rl.check.memory_remedies import memory_problems
from rl.check.no_effect import doubtful, no_effect
from rl.check.resume import check_resume
from rl.check.run_folder import folder_problems
from rl.check.this_machine import has_gpus, host_memory_gb, machine_lines, machine_problems
from rl.checkpoints.checkpoint import find, read_state
from rl.config.schema import ConfigError, RunConfig, listed
from rl.judge.endpoint import is_loopback, resolve_api_bases
from rl.memory import footprint, memory_plan
from rl.memory.memory_plan import Plan
from rl.ranks import placement
from rl.text.scrub import remember, scrubbed
from rl.trackers.wandb_page import allowed_by_env

DATA_FILES = (".json", ".jsonl", ".txt", ".csv", ".parquet", ".arrow")


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
    """Title -> 'key: why', of keys that have no effect or hardly the intended one. Call `problems`
    first."""
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
    ranks start, or its memory of `host_gb` (None: unknown); [] where the policy is on no GPU.
    Call `problems` first."""
    resolved = build.resolve(config)
    if lacking := machine_problems(resolved, starts=True):
        return lacking
    own_gb = own_gpu_gb(resolved, machine, num_ranks)
    if own_gb is None:
        return []
    owns = _own_devices(resolved, num_ranks)

    def size_of(device: str) -> float:
        places = [placement.resolve_device(device, own) for own in owns]
        return _smallest_gb(machine, places) or math.inf

    found = memory_problems(resolved, own_gb, size_of)
    return found or _host_problems(resolved, own_gb, num_ranks, host_gb)


def own_gpu_gb(
    resolved: build.Resolved, machine: placement.Machine, num_ranks: int
) -> float | None:
    """The smallest GPU of `machine` that holds a rank's policy; None where none does."""
    return _smallest_gb(machine, _own_devices(resolved, num_ranks))


def _own_devices(resolved: build.Resolved, num_ranks: int) -> list[str]:
    stated = footprint.policy_device(resolved)
    return [f"cuda:{rank}" if stated == "auto" else stated for rank in range(num_ranks)]


def _smallest_gb(machine: placement.Machine, devices: Sequence[str]) -> float | None:
    sizes_gb = {f"cuda:{index}": gb for index, gb in enumerate(machine.cuda_gb)}
    return min((sizes_gb[device] for device in devices if device in sizes_gb), default=None)


def _host_problems(
    resolved: build.Resolved, gpu_gb: float, num_ranks: int, host_gb: float | None
) -> list[str]:
    planned = footprint.host_footprint(resolved, gpu_gb, num_ranks)
    return [] if planned is None else memory_plan.host_problems(planned, num_ranks, host_gb)


def report(config: RunConfig, gpu_gb: float, online: bool = False) -> tuple[str, int]:
    """(what the run would be, exit code: 1 when something is wrong); the last lines say which.
    `online`: ask the judge, too."""
    try:
        resolved = build.resolve(config)
    except ConfigError as error:
        return _verdict(list(error.problems), [])
    if unusable := folder_problems(config.run_dir):
        return _verdict(unusable, [])
    state, conflicts = _resume(config)
    num_ranks = min(config.world_size, compatibility.RANKS_OF_A_NODE)
    host_gb = host_memory_gb() if has_gpus() else None
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
        "disk": [disk_line(resolved)],
        "this machine": machine_lines(resolved),
        "leaves this machine": list(_leaving_lines(resolved)) or ["nothing"],
        **_remarks(resolved),
    }
    found = [*compatibility.compatibility_problems(resolved), *unfit, *conflicts]
    found += machine_problems(resolved)
    keys = []
    if not found:
        found = dry_problems(resolved)
        keys = [plug.key for plug in tried(resolved) if not plug.cls.__module__.startswith("rl.")]
    if keys:
        blocks[f"tried on made-up inputs, so that their code has run: {', '.join(keys)}"] = []
    if online and not found:
        blocks["judge, asked now"], found = _asked_now(resolved)
    last, code = _verdict(found, footprint.unknowns(resolved))
    lines = ["\n  ".join([title, *block]) for title, block in blocks.items()]
    return "\n".join([*lines, last]), code


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
    completions = config.prompts_per_iteration * config.generations_per_prompt
    draws = resolved.renderer.cls.makes_images
    pictures = completions * config.images_per_completion if draws else 0
    counts = {
        "prompts": config.prompts_per_iteration,
        "completions": completions,
        "pictures": pictures,
        "judge questions": pictures * _questions_per_picture(resolved),
    }
    optimizer = config.optimizer
    per_update = completions / ranks / optimizer.updates_per_iteration
    kept, why = footprint.kept_tokens(resolved)
    return [
        *(
            f"{name:<20} {count:>8g} an iteration {count / ranks:>8g} on each of {ranks} ranks"
            for name, count in counts.items()
        ),
        f"{'optimiser steps':<20} {optimizer.updates_per_iteration:>8} an iteration, each of "
        f"{per_update:g} completions a rank",
        f"{'forwards':<20} in rows of up to {optimizer.max_tokens_per_micro_batch} tokens; a group "
        f"is {footprint.group_tokens(resolved)} at the most",
        f"{'kept for backward':<20} {kept} tokens on each rank, "
        + (f"not all ({why})" if why else "all there can be"),
        f"{'whole run':<20} {_length(resolved)}",
    ]


def _length(resolved: build.Resolved) -> str:
    """Iterations <-> epochs, as far as the number of samples is known."""
    config = resolved.config
    counts = [plug.cls.count(plug.config) for plug in resolved.train]
    known = [count for count in counts if count is not None]
    if len(known) < len(counts):
        if config.num_epochs is not None:
            return f"{config.num_epochs:g} epochs; iterations are known once the data is loaded"
        return f"{config.num_iterations} iterations; epochs are known once the data is loaded"
    num_samples, prompts = sum(known), config.prompts_per_iteration
    if not num_samples or (config.num_iterations is None) == (config.num_epochs is None):
        return f"{num_samples or 'no'} samples"
    iterations = build.num_iterations(config, num_samples)
    return (
        f"{iterations} iterations of {prompts} prompts = {iterations * prompts / num_samples:.3g} "
        f"epochs of {num_samples} samples"
    )


def _questions_per_picture(resolved: build.Resolved) -> int:
    rewards = (plug for plug in resolved.rewards.values() if plug.cls.needs_judge)
    return sum(plug.cls.num_questions(plug.config) for plug in rewards)


def _judge_lines(resolved: build.Resolved) -> list[str]:
    config, judge, evaluation = resolved.config, resolved.config.judge, resolved.config.evaluation
    per_picture = _questions_per_picture(resolved)
    if not per_picture:
        return ["is not asked"]
    per_sample = config.images_per_completion * per_picture
    training = config.prompts_per_iteration * config.generations_per_prompt * per_sample
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
    if every := evaluation.every_n_iterations:
        draws = resolved.renderer.cls.makes_images
        cut = evaluation.thought_gain and resolved.policy.config.thought is not None
        arms = 1 + (draws and config.bare_arm != "never") + evaluation.reference_drift + cut
        held_out = evaluation.num_samples * per_sample
        line = f"held-out run: up to {held_out * arms} more every {every} iterations"
        if draws and evaluation.stock_arm and not resolved.policy.cls.starts_as_stock:
            line += f", and {2 * held_out} once for the stock arm"
        lines.append(line)
    return lines


def _asked_now(resolved: build.Resolved) -> tuple[list[str], list[str]]:
    """(the judge's answers, problems)."""
    judge = resolved.config.judge
    if not resolved.needs_judge:
        return ["no reward asks one"], []
    if judge.start_command:
        return ["not asked: it is there once the run has started it, and asked then"], []
    heard = asyncio.run(ask_judge(resolved, resolve_api_bases(judge.api_base), wait_s=0.0))
    return heard.lines or ["none answered"], heard.problems


def _memory_lines(resolved: build.Resolved, gpu_gb: float, unfit: Sequence[str]) -> list[str]:
    unknown = [f"unknown: {text}" for text in footprint.unknowns(resolved)]
    planned = footprint.footprint(resolved, gpu_gb)
    if planned is None:
        device = footprint.policy_device(resolved)
        return unknown or [f"not planned: policy.device is {device!r}"]
    lines = [*_table(planned), *(f"assumed: {text}" for text in planned.assumptions)]
    if planned.engine is not None:
        lines.append(memory_plan.engine_line(planned, gpu_gb))
        lines.append(memory_plan.residency_line(planned, gpu_gb))
    free_gb = gpu_gb - planned.peak_gb
    if free_gb < 0:
        fits = f"DOES NOT FIT by {-free_gb:.1f} GB"
    elif unfit:
        fits = f"DOES NOT FIT, though the sum leaves {free_gb:.1f} GB: see below"
    else:
        fits = f"{'what is known fits' if unknown else 'fits'} with {free_gb:.1f} GB to spare"
        if free_gb < gpu_gb * memory_plan.FREE_SHARE:
            fits += ", which is tight (a tenth should stay free)"
    return [*lines, *unknown, fits]


def _host_lines(
    resolved: build.Resolved, gpu_gb: float, num_ranks: int, host_gb: float | None
) -> list[str]:
    planned = footprint.host_footprint(resolved, gpu_gb, num_ranks)
    if planned is None:
        return ["not planned: see above"]
    there = "" if host_gb is None else f", of {host_gb:.1f} here"
    peak = f"{planned.peak_gb:.1f} GB at its peak{there}"
    return [*_table(planned), f"{peak}; pages of files that are read come besides"]


def _table(planned: Plan) -> list[str]:
    """A line for each part, a column for each phase, and the sums."""
    lines = [f"{'GB':<28}" + "".join(f"{phase:>10}" for phase in planned.phases)]
    for row in planned.rows:
        cells = (f"{row.gb:10.2f}" if p in row.phases else " " * 10 for p in planned.phases)
        lines.append(f"{row.part:<28}" + "".join(cells))
    totals = "".join(f"{planned.total_gb(phase):>10.2f}" for phase in planned.phases)
    return [*lines, f"{'sum':<28}{totals}"]


def _leaving_lines(resolved: build.Resolved) -> Iterator[str]:
    """What the run sends to which other machine."""
    config, tracking = resolved.config, resolved.config.tracking
    hub = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co")).netloc
    if resolved.needs_judge and config.judge.api_base:
        with suppress(ValueError):  # reported as a problem
            for base in resolve_api_bases(config.judge.api_base):
                if not is_loopback(base):
                    plain = ", unencrypted" if base.startswith("http:") else ""
                    place = f"{urlsplit(base).netloc}{plain}"
                    yield f"to the judge at {place}: instructions, completions and pictures"
    asked = dict.fromkeys(path for _, path, _ in hub_models(resolved))
    for plug in (*resolved.train, *resolved.validation):
        paths = plug.cls.reads_from(plug.config)
        not_here = [path for path in paths if not Path(path).exists()]
        asked |= dict.fromkeys(p for p in not_here if Path(p).suffix not in DATA_FILES)
    if asked and not is_offline():
        yield f"asked of {hub}, by name: {', '.join(asked)}"
    if every := config.checkpoint.push_to_hub_every_n_iterations:
        place = f"{hub}/{config.checkpoint.push_to_hub_repo_id}"
        yield f"to {place}: the model, every {every} iterations"
    what = "the config, metrics, and episodes with their pictures"
    if allowed_by_env(tracking.wandb) == "online":
        host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).netloc
        yield f"to {host} (wandb): {what}"
    if tracking.trackio and tracking.trackio_space:
        yield f"to {hub}/spaces/{tracking.trackio_space} (trackio): {what}"


def _resume(config: RunConfig) -> tuple[str, list[str]]:
    """(state of the run folder, what forbids to go on from it)."""
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
