"""Reports what a config would do, without training and without torch: `rl check config.jsonnet`."""

from __future__ import annotations

import asyncio
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from rl import build
from rl.check import compatibility, judge_verdict
from rl.check.ask_judge import START_PATIENCE_S, ask_judge
from rl.check.check_data import DataReport, check_data
from rl.check.dry_run import dry_problems, plugins_to_try
from rl.check.fetch import hub_models, is_offline
from rl.check.memory_remedies import memory_problems
from rl.check.no_effect import doubtful, no_effect
from rl.check.resume import check_resume
from rl.check.run_folder import folder_problems
from rl.check.this_machine import (
    disk_line,
    has_gpus,
    host_memory_gb,
    machine_lines,
    machine_problems,
)
from rl.check.what_changes import UNKNOWN, Origin, changes, dropped, explained
from rl.config.schema import ConfigError, RunConfig, listed
from rl.judge.http import resolve_api_bases
from rl.memory import footprint, memory_plan
from rl.memory.memory_plan import Plan
from rl.policies.shared.policy_base import start_of
from rl.printing import remember, scrubbed
from rl.ranks import dist
from rl.record.checkpoint import find, read_state
from rl.simulation.pool_report import pool_lines


def problems(config: RunConfig, with_data: bool = True) -> list[str]:
    """Everything that keeps this config from running, each with its key and remedy. `with_data`:
    its rows, too."""
    try:
        resolved = build.resolve(config)
    except ConfigError as error:
        return list(error.problems)
    if unusable := folder_problems(config.run_dir):
        return unusable
    config_problems = compatibility.compatibility_problems(resolved) + _resume(config)[1]
    config_problems += check_data(resolved).problems if with_data else []
    return config_problems or dry_problems(resolved)


def remarks(
    resolved: build.Resolved, data: DataReport, origin: Origin = UNKNOWN
) -> dict[str, list[str]]:
    """Title -> lines 'key: why' for keys that have no effect, or probably not the intended one, and
    for what is odd about the data. `origin`: as in `report`."""
    lines_by_title = {
        "data that is probably not what is meant": data.warnings,
        "replaced without +, which drops values of the imported file": dropped(resolved, origin),
        "set, and without effect here": no_effect(resolved),
        "set, and probably a mistake": doubtful(resolved),
    }
    if run := getattr(resolved.policy.config, "from_run", ""):
        with suppress(ValueError, OSError):  # the policy reports it
            lines_by_title["starts from another run's adapter"] = [
                f"policy.from_run: {start_of(run)}"
            ]
    return {title: lines for title, lines in lines_by_title.items() if lines}


def problems_here(
    config: RunConfig, machine: dist.Machine, num_ranks: int, host_gb: float | None = None
) -> list[str]:
    """What this machine lacks or, if it lacks nothing, what does not fit in the GPUs of `machine`,
    on which `num_ranks` ranks start, or in `host_gb` of host memory (None: unknown). Checks memory
    only if the policy is on a GPU. Call `problems` first."""
    resolved = build.resolve(config)
    if missing := machine_problems(resolved, is_start=True):
        return missing
    own_gb = smallest_gpu_gb(resolved, machine, num_ranks)
    if own_gb is None:
        return []

    def size_of(device: str) -> float:
        return smallest_gpu_gb(resolved, machine, num_ranks, device) or math.inf

    on_host = footprint.host_footprint(resolved, own_gb, num_ranks)
    misfits = memory_problems(resolved, own_gb, size_of)
    return misfits or memory_plan.host_problems(on_host, num_ranks, host_gb)


def smallest_gpu_gb(
    resolved: build.Resolved, machine: dist.Machine, num_ranks: int, device: str = "auto"
) -> float | None:
    """Memory in GB of the smallest GPU of `machine` that `device` resolves to on any rank ('auto':
    the policy's GPU); None if `device` is not a GPU."""
    stated = footprint.policy_device(resolved)
    rank_devices = [f"cuda:{rank}" if stated == "auto" else stated for rank in range(num_ranks)]
    devices = {dist.resolve_device(device, rank_device) for rank_device in rank_devices}
    sizes_gb = (gb for index, gb in enumerate(machine.cuda_gb) if f"cuda:{index}" in devices)
    return min(sizes_gb, default=None)


def report(
    config: RunConfig, gpu_gb: float, online: bool = False, origin: Origin = UNKNOWN
) -> tuple[str, int]:
    """(report, exit code: 1 if there are problems); the report's last lines list them. `online`:
    also ask the judge. `origin`: what the config states and imports."""
    try:
        resolved = build.resolve(config)
    except ConfigError as error:
        return _verdict(explained(error.problems, origin), [])
    if unusable := folder_problems(config.run_dir):
        return _verdict(unusable, [])
    state, conflicts = _resume(config)
    data = check_data(resolved)
    num_ranks = min(config.world_size, compatibility.RANKS_OF_A_NODE)
    host_gb = host_memory_gb() if has_gpus() else None
    on_host = footprint.host_footprint(resolved, gpu_gb, num_ranks)
    unfit = memory_problems(resolved, gpu_gb)
    unfit += memory_plan.host_problems(on_host, num_ranks, host_gb)
    blocks = {
        f"run {config.run_name} in {config.run_dir}: {state}": [],
        "plugins": [
            f"{plugin.key:<20} {plugin.name:<22} {path}".rstrip()
            for plugin in resolved.plugins
            for path in [*plugin.cls.reads_from(plugin.config), ""][:1]
        ],
        "placement": dist.describe(build.claims(resolved)),
        "batch": _batch_lines(resolved, data.num_rows),
        "data": data.lines,
        f"memory per GPU, against {gpu_gb:g} GB": _memory_lines(resolved, gpu_gb, unfit),
        f"host memory of a machine with {num_ranks} ranks": (
            _table(on_host) if on_host else ["not planned: see above"]
        ),
        **{key: _judge_lines(part) for key, part in resolved.by_judge.items()},
        **({"render pool": pool_lines(resolved)} if config.pool else {}),
        "disk": [disk_line(resolved)],
        "this machine": machine_lines(resolved),
        **changes(origin),
    }
    warnings = remarks(resolved, data, origin)
    failures = [*compatibility.compatibility_problems(resolved), *data.problems]
    failures += [*unfit, *conflicts]
    failures += [*machine_problems(resolved), *_audit_problems(resolved)]
    tried_keys = []
    if not failures:
        failures = dry_problems(resolved)
        tried_keys = [
            p.key for p in plugins_to_try(resolved) if not p.cls.__module__.startswith("rl.")
        ]
    if tried_keys:
        blocks[f"plugins whose code has run, on made-up inputs: {', '.join(tried_keys)}"] = []
    if online and not failures:
        for key, part in resolved.by_judge.items():
            lines, problems = (
                _asked_now(part, data.most_pictures)
                if part.needs_judge
                else (["no reward asks it"], [])
            )
            blocks[f"{key}, asked now"] = lines
            failures += problems if key == "judge" else [f"{key}: {text}" for text in problems]
    blocks |= warnings
    num_warnings = sum(map(len, warnings.values()))
    verdict, code = _verdict(failures, footprint.unknowns(resolved), num_warnings)
    lines = ["\n  ".join([title, *block]) for title, block in blocks.items()]
    return "\n".join([*lines, verdict]), code


def judge_problems(resolved: build.Resolved, num_sources: int) -> list[str]:
    """What a start would find out about the judge after it has fetched models; [] if none is to be
    fetched. `num_sources`: as in `ask_judge`."""
    main = resolved.by_judge["judge"]
    if not main.needs_judge or is_offline() or all(known for *_, known in hub_models(resolved)):
        return []
    return _asked_now(main, num_sources, START_PATIENCE_S)[1]


def _asked_now(
    resolved: build.Resolved, num_sources: int, wait_s: float = 0.0
) -> tuple[list[str], list[str]]:
    """(what the judge's endpoints answered, problems). `wait_s`: time limit of a judge's start."""
    judge = resolved.config.judge
    if judge.start_command:
        return ["not asked now: the run starts the judge and then asks it"], []
    bases = resolve_api_bases(judge.api_base)
    check = asyncio.run(ask_judge(resolved, bases, wait_s, num_sources=num_sources))
    return check.lines or ["none answered"], check.problems


def _verdict(problems: list[str], unknowns: list[str], num_warnings: int = 0) -> tuple[str, int]:
    if problems:
        return f"{len(problems)} wrong\n{listed(problems)}", 1
    above = f"; {num_warnings} warning{'s' * (num_warnings > 1)} above" if num_warnings else ""
    if unknowns:
        parts = " and ".join(unknown.partition(":")[0] for unknown in unknowns)
        text = f"no mistake found; whether it fits its GPUs is unknown ({parts}: see above)"
        return text + above, 0
    return f"nothing is wrong{above}", 0


def _batch_lines(resolved: build.Resolved, num_rows: Mapping[str, int]) -> list[str]:
    config, ranks = resolved.config, resolved.config.world_size
    completions = config.prompts_per_iteration * config.generations_per_prompt
    makes_images = resolved.renderer.cls.makes_images
    pictures = completions * config.images_per_completion if makes_images else 0
    counts = {
        "prompts": config.prompts_per_iteration,
        "completions": completions,
        "pictures": pictures,
        "judge questions": pictures * _questions_per_picture(resolved),
    }
    optimizer = config.optimizer
    per_update = completions / ranks / optimizer.updates_per_iteration
    num_kept, why = footprint.kept_tokens(resolved)
    policy, algorithm = resolved.policy, config.algorithm
    reference = "none"
    if algorithm.kl_coeff:
        start = policy.cls.start_adapter(policy.config) if algorithm.kl_reference == "start" else ""
        reference = f"the adapter that the run starts from, {start}" if start else "the base model"
    return [
        *(
            f"{name:<20} {count:>8g} an iteration {count / ranks:>8g} on each of {ranks} ranks"
            for name, count in counts.items()
        ),
        f"{'optimizer steps':<20} {optimizer.updates_per_iteration:>8} an iteration, each of "
        f"{per_update:g} completions a rank",
        f"{'forwards':<20} in rows of up to {optimizer.max_tokens_per_micro_batch} tokens; a group "
        f"has at most {footprint.group_tokens(resolved)}",
        f"{'kept for backward':<20} {num_kept} tokens on each rank, "
        + (f"not all ({why})" if why else "all there can be"),
        f"{'KL reference':<20} {reference}",
        f"{'whole run':<20} {_length(resolved, num_rows)}",
    ]


def _length(resolved: build.Resolved, num_rows: Mapping[str, int]) -> str:
    """The run's length in iterations and in epochs, if the number of samples is known. `num_rows`:
    that of each data source which has been read."""
    config = resolved.config
    counts = [num_rows.get(plugin.key) for plugin in resolved.train]
    num_samples = sum(count or 0 for count in counts)
    lengths = {"iterations": config.num_iterations, "epochs": config.num_epochs}
    stated = [f"{number:g} {unit}" for unit, number in lengths.items() if number is not None]
    if len(stated) != 1 or None in counts or not num_samples:
        text = " and ".join(stated) or "no length stated"
        return f"{text}; the number of samples is not known before they are loaded"
    iterations, prompts = build.num_iterations(config, num_samples), config.prompts_per_iteration
    return (
        f"{iterations} iterations of {prompts} prompts = {iterations * prompts / num_samples:.3g} "
        f"epochs of {num_samples} samples"
    )


def _questions_per_picture(resolved: build.Resolved, held_out: bool = False) -> int:
    rewards = (
        plugin
        for plugin in resolved.rewards.values()
        if plugin.cls.needs_judge and (held_out or not plugin.keys.held_out_only)
    )
    return sum(plugin.cls.num_questions(plugin.config) for plugin in rewards)


def _judge_lines(resolved: build.Resolved) -> list[str]:
    config, judge, evaluation = resolved.config, resolved.config.judge, resolved.config.evaluation
    if not resolved.needs_judge:
        return ["is not asked"]
    per_picture = _questions_per_picture(resolved)
    pictures = config.generations_per_prompt * config.images_per_completion
    training = config.prompts_per_iteration * pictures * per_picture
    base = judge.api_base if isinstance(judge.api_base, str) else ", ".join(judge.api_base)
    lines = [f"{judge.model} at {base or 'the URL that start_command writes'}"]
    if judge.start_command:
        lines.append(f"started by the run on each node: {shlex.join(judge.start_command)}")
    lines += [
        f"{name}: {plugin.name}, {plugin.cls.num_questions(plugin.config)} questions a picture"
        for name, plugin in resolved.rewards.items()
        if plugin.cls.needs_judge
    ]
    if judge.audit != "off" and judge_verdict.rewards_that_ask(resolved):
        with suppress(ValueError):  # a damaged file, which `_audit_problems` reports
            known = judge_verdict.verdict(resolved)
            at_start = known.passed is None and judge.audit == "required"
            lines.append("audit: " + ("by the run, at its start" if at_start else known.text))
    in_flight = judge.max_concurrency * config.world_size
    limits = f"up to {in_flight} in flight, {judge.max_attempts} tries each"
    per_hour = f"{training * 60} an hour at one iteration a minute; " if training else ""
    lines.append(f"{training} questions an iteration: {per_hour}{limits}")
    if every := evaluation.every_n_iterations:
        makes_images = resolved.renderer.cls.makes_images
        cuts_thoughts = evaluation.thought_gain and resolved.policy.config.thought is not None
        arms = 1 + evaluation.reference_drift + cuts_thoughts
        arms += makes_images and config.bare_arm != "never"
        per_picture = _questions_per_picture(resolved, held_out=True)
        held_out = evaluation.num_samples * config.images_per_completion * per_picture
        lines.append(f"evaluation: up to {held_out * arms} more every {every} iterations")
        if makes_images and evaluation.stock_arm and not resolved.policy.cls.starts_as_stock:
            lines.append(f"stock arm: {2 * held_out} more, once")
    return lines


def _audit_problems(resolved: build.Resolved) -> Iterator[str]:
    for key, part in resolved.by_judge.items():
        setting = part.config.judge.audit
        if setting == "off" or not judge_verdict.rewards_that_ask(part):
            continue
        try:
            verdict = judge_verdict.verdict(part)
        except ValueError as error:
            yield f"{key}.audit: {error}"
            continue
        if setting == "required" and verdict.passed is False:
            yield f"{key}.audit: {verdict.text}"


def _memory_lines(resolved: build.Resolved, gpu_gb: float, unfit: Sequence[str]) -> list[str]:
    unknown = [f"unknown: {text}" for text in footprint.unknowns(resolved)]
    planned = footprint.footprint(resolved, gpu_gb)
    if planned is None:
        device = footprint.policy_device(resolved)
        return unknown or [f"not planned: policy.device is {device!r}"]
    lines = _table(planned)
    lines += [f"{gb:.2f} GB more on {device}" for device, gb in planned.elsewhere.items()]
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


def _table(planned: Plan) -> list[str]:
    """A line for each part, a column for each phase, and the sums."""
    widths = {phase: max(len(phase) + 1, 6) for phase in planned.phases}
    first = max(len(row.part) for row in planned.rows)
    lines = [f"{'GB':<{first}}" + "".join(f"{phase:>{n}}" for phase, n in widths.items())]
    for row in planned.rows:
        gb = f"{row.gb:.1f}"
        cells = (f"{gb if phase in row.phases else '':>{n}}" for phase, n in widths.items())
        lines.append(f"{row.part:<{first}}" + "".join(cells))
    totals = "".join(f"{planned.total_gb(phase):>{n}.1f}" for phase, n in widths.items())
    return [*lines, f"{'sum':<{first}}{totals}"]


def _resume(config: RunConfig) -> tuple[str, list[str]]:
    """(what a start does with the run folder, problems that prevent a resume)."""
    checkpoint = find(config.run_dir, hashes=False)
    if checkpoint.problem:
        return "cannot go on", [f"run_name: {checkpoint.problem}"]
    if checkpoint.path is None:
        has_records = (config.run_dir / "metrics.jsonl").is_file()
        return "starts afresh" + (", and sets aside the old records" * has_records), []
    for judge in config.judges:
        remember(judge.api_key_env)
    current = scrubbed(config.model_dump(mode="json"))
    text = "cannot go on"
    try:
        state = read_state(checkpoint.path)
        text = "; ".join((f"goes on after {state['iteration']} iterations", *checkpoint.remarks))
        changes = check_resume(state["meta"]["config"], current)
    except ValueError as error:
        return text, [f"run_name: {error}"]
    return text + (f" (changed: {', '.join(changes)})" if changes else ""), []
