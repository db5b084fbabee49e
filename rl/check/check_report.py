"""What `rl check` says of a config: the report, keys without effect, what a file changes, rows."""

from __future__ import annotations

import asyncio
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl import build
from rl.api import find
from rl.api.policy import Policy
from rl.build import Resolved
from rl.check import compatibility, memory_plan, trials
from rl.check.compatibility import check_resume, leaves, licences, memory_problems
from rl.check.memory_plan import PHASES, Plan
from rl.check.this_machine import (
    disk_line,
    has_gpus,
    host_memory_gb,
    hub_models,
    is_offline,
    machine_lines,
    machine_problems,
)
from rl.check.trials import START_PATIENCE_S, ask_judge, dry_problems
from rl.config.loading import FOLDER, MISSING, base_of, evaluate, find_config, not_a_file
from rl.config.schema import (
    SHIPPED_LOSSES,
    ConfigError,
    RunConfig,
    SamplingConfig,
    Section,
    Unread,
    changed,
    listed,
)
from rl.judge.http import resolve_api_bases
from rl.printing import excerpt, remember, scrubbed
from rl.ranks import dist
from rl.record.checkpoint import find as find_checkpoint
from rl.record.checkpoint import read_state
from rl.record.run_summary import LOCKS

# ---- no effect -----------------------------------------------------------------------------------
# Reports keys that are set without effect, or probably without the effect that the user means.


def no_effect(resolved: Resolved) -> Iterator[str]:
    """'key: why' for each key that has no effect and is set to another value than its default."""
    config, renderer, policy = resolved.config, resolved.renderer, resolved.policy
    lora, algorithm, optimizer = policy.config.lora, config.algorithm, config.optimizer
    ratio_varies = bool(
        config.max_staleness or optimizer.updates_per_iteration > 1 or (lora and lora.dropout)
    )
    facts = {
        "evaluation.every_n_iterations": config.evaluation.every_n_iterations,
        "judge.is_asked": resolved.by_judge["judge"].needs_judge,
        "policy.ratio": 1 if not ratio_varies and algorithm.loss in SHIPPED_LOSSES else "any",
        "policy.has_bare_arm": (
            policy.cls.pass_through_completion is not Policy.pass_through_completion
        ),
        "policy.thought": policy.config.thought,
        "renderer.accepts": renderer.cls.accepts,
        "renderer.makes_images": renderer.cls.makes_images,
    }
    yield from unread(config, facts)
    kept, why_not_kept = memory_plan.kept_tokens(resolved)
    if not kept and optimizer.max_kept_tokens:
        yield f"optimizer.max_kept_tokens: nothing can be kept ({why_not_kept})"
    for reward in resolved.rewards.values():
        if reward.keys.judge is not None and not reward.cls.needs_judge:
            yield f"{reward.key}.judge: reward {reward.name} asks no judge"
    for plugin in resolved.plugins:
        yield from unread(plugin.config, facts, f"{plugin.key}.")


def unread(
    section: Section, around: Mapping[str, Any], at: str = "", why: str = ""
) -> Iterator[str]:
    """'key: why' for each key of the section, and of those inside it, that is set though its
    `Unread` says that nothing reads it. `around`: what a `gate` may name; `at`: the section's
    prefix; `why`: why nothing reads the whole section."""
    known = {**around, **dict(section)}
    for key, info in type(section).model_fields.items():
        value = getattr(section, key)
        values = value.items() if isinstance(value, dict) else [("", value)]
        inside = {name: part for name, part in values if isinstance(part, Section)}
        reasons = (note.why(known) for note in info.metadata if isinstance(note, Unread))
        reason = why or next(filter(None, reasons), "")
        for name, part in inside.items():
            prefix = f"{at}{key}.{name}." if name else f"{at}{key}."
            yield from unread(part, known, prefix, reason)
        if reason and not inside and changed(section, [key]):
            yield f"{at}{key}: {reason}"


def doubtful(resolved: Resolved) -> Iterator[str]:
    """'key: why' for each key that is valid but probably does not do what the user means."""
    sampling, algorithm = resolved.config.sampling, resolved.config.algorithm
    for key, cuts in (("top_p", sampling.top_p < 1), ("top_k", sampling.top_k > 0)):
        if cuts:
            yield (
                f"sampling.{key}: {getattr(sampling, key):g} removes tokens, so the engine's "
                "log-probs are of the truncated distribution, the trainer's of the full one: every "
                "importance weight is below 1, mismatch/* measures the truncation, and an engine "
                "with wrong weights is not noticed. Use "
                f"{SamplingConfig.model_fields[key].default} (off)"
            )
    if algorithm.loss == "dr_grpo" and algorithm.advantage_scale != "none":
        yield (
            f"algorithm.advantage_scale: {algorithm.advantage_scale!r} divides by a standard "
            "deviation, which loss 'dr_grpo' avoids (Liu et al. 2025). Use 'none', or loss "
            "'grpo' or 'dapo'"
        )
    if algorithm.truncated_completions == "mask" and resolved.policy.config.thought is not None:
        yield (
            "algorithm.truncated_completions: 'mask' keeps an unfinished thought out of the loss, "
            "so the policy is never taught to end one. Use 'floor' or 'score'"
        )


# ---- run folder ----------------------------------------------------------------------------------
# Checks that a run's folder can be used: it is a folder, writable, with ordinary files.

LOGS = "logs"
APPENDED = ("metrics.jsonl", "config.json", *LOCKS)
"""Existing files in the run folder that a resumed run opens for writing, like all in `LOGS` and
`judge`."""
FOLDERS = (
    LOGS, "checkpoints", "episodes", "evaluation", "images", "judge", "set_aside", "stock",
    "thumbnails",
)  # fmt: skip
"""Folders in the run folder."""


def folder_problems(run_dir: Path) -> list[str]:
    """Why `run_dir` cannot be a run's folder: it or a parent is not a folder, one of its files is a
    link or not a regular file, one of its folders is a file, or one of either is not writable."""
    if run_dir.parts[0].startswith("~"):
        return _problem(run_dir, "begins with ~, which only a shell replaces; write it out")
    for path in (run_dir, *run_dir.parents):
        why = not_a_file(path)
        if why == FOLDER:
            break
        if why != MISSING:
            return _problem(path, f"{why or 'is a file'}; name a folder")
    opened = [run_dir / name for name in (*FOLDERS, *APPENDED)]
    opened += [file for name in (LOGS, "judge") for file in sorted((run_dir / name).glob("*"))]
    for path in (run_dir, *sorted(run_dir.glob("*/")), *opened):
        why = not_a_file(path)
        if path.is_symlink() and why != FOLDER:  # folders may be links to another disk
            return _problem(path, "is a link, and a run does not write through links; remove it")
        if why not in ("", MISSING, FOLDER):
            return _problem(path, "is not an ordinary file; remove it")
        name = path.relative_to(run_dir).as_posix()
        has, needs = ("folder", "file") if why == FOLDER else ("file", "folder")
        if why != MISSING and name in (FOLDERS if needs == "folder" else APPENDED):
            return _problem(path, f"is a {has}, and a run has a {needs} of that name; move it away")
        mode = os.W_OK | (os.X_OK if why == FOLDER else 0)
        if why != MISSING and not os.access(path, mode, effective_ids=True):
            return _problem(path, READ_ONLY.format("no permission, or a read-only disk"))
    return []


def create_and_check(run_dir: Path) -> list[str]:
    """Create the folder and its `logs`, where ranks write first; return its `folder_problems`."""
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)  # private until the user shares it
        (run_dir / LOGS).mkdir(exist_ok=True)
        problems = folder_problems(run_dir)
        if not problems:
            tempfile.TemporaryFile(dir=run_dir / LOGS).close()
    except OSError as error:
        reason = READ_ONLY.format(error.strerror or error)
        return _problem(Path(error.filename or run_dir), reason)
    return problems


READ_ONLY = "cannot be written to ({}); make it writable or use another folder"


def _problem(path: Path, problem: str) -> list[str]:
    return [f"base_exp_dir: {excerpt(str(path), 300)} {problem}"]


# ---- dropped -------------------------------------------------------------------------------------
# What a config loses by mistake of the file that it imports.

Values = Mapping[str, Any]
NAMES = ("run_name", "base_exp_dir")
"""Keys that every config sets, and that the imported file may lack."""
BY_NAME = ("rewards", "weights")
"""Sections whose keys are names of rewards: to drop some of these is no mistake."""


def dropped(
    path: str | Path, overrides: Sequence[str], resolved: Resolved | None = None
) -> Iterator[str]:
    """'section: what it drops of the imported file, and how to keep it', for each section of the
    config in the file at `path` that is replaced without `+`. Given `resolved`, a dropped
    value that equals the default is not listed."""
    file = find_config(path)
    own = evaluate(file, overrides, os.environ)[0] if file else None
    if file is None or own is None:
        return
    name, base = base_of(file, os.environ, {key: own[key] for key in NAMES if key in own})
    now = {}
    if resolved is not None:
        now = dict(leaves(resolved.config.model_dump(mode="json")))
        for plugin in resolved.plugins:
            now |= leaves(plugin.config.model_dump(mode="json"), plugin.key)
    for section, lost in _replaced(own, base, "\n".join([file.read_text("utf-8"), *overrides])):
        keys = [key for key, was in lost.items() if (f"{section}.{key}", was) not in now.items()]
        if keys:
            parts = section.split(".")
            keep = "+: { ".join([*parts, "..."]) + " }" * len(parts)
            yield f"{section}: drops {', '.join(keys)} of {name}; write {keep} to keep them"


def explained(problems: Sequence[str], path: str | Path, overrides: Sequence[str]) -> list[str]:
    """The problems of a config and, if a key is missing, what its sections drop."""
    is_missing = any(": missing" in problem for problem in problems)
    return [*problems, *(dropped(path, overrides) if is_missing else ())]


def _replaced(own: Values, base: Values, text: str, at: str = "") -> Iterator[tuple[str, Values]]:
    """(dotted key, what it lacks of `base`) of each section of the same type that `text` writes as
    `key: {`, not as `key+: {`."""
    for key, was in base.items():
        new: Any = own.get(key)
        are_sections = isinstance(was, Mapping) and isinstance(new, Mapping)
        if are_sections and new.get("type", was.get("type")) == was.get("type"):
            if key not in BY_NAME and re.search(rf"\b{re.escape(key)}[:=] *{{", text):
                yield f"{at}{key}", {name: was[name] for name in was if name not in new}
            yield from _replaced(new, was, text, f"{at}{key}.")


# ---- check data ----------------------------------------------------------------------------------
# Opens a run's data sources before it starts, and reports what is wrong with their rows.

MAX_OPENED = 20_000
"""Pictures of one source that `rl check` opens, in some six seconds."""


@dataclass
class DataReport:
    """What the sources of a run hold, each under its key."""

    problems: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    """The number of rows of each source, and what was not read."""
    num_rows: dict[str, int] = field(default_factory=dict)
    most_pictures: int = 1
    """Largest number of source pictures of a row."""
    checked: dict[str, Sequence[int]] = field(default_factory=dict)
    """For `RowRules.checked`."""


def check_data(resolved: Resolved, is_start: bool = False) -> DataReport:
    """Open each source and check its rows. Without `is_start`, only those that are on this machine
    and are opened quickly, with at most `MAX_OPENED` pictures each."""
    report = DataReport()
    rules = build.row_rules(resolved, None if is_start else MAX_OPENED)
    plugins = [*resolved.train, *resolved.validation]
    for plugin in sorted(plugins, key=lambda plugin: not plugin.cls.is_here(plugin.config)):
        if not plugin.cls.is_here(plugin.config) and (not is_start or report.problems):
            report.lines.append(f"{plugin.key}: not read; a start reads it")
            continue
        try:
            source = build.open_source(plugin, rules)
        except ValueError as error:
            report.problems.append(f"{plugin.key}: {str(error).removeprefix(f'{plugin.key}: ')}")
            continue
        findings = source.findings
        left_out = f"; left out as bad: {source.num_skipped}" if source.num_skipped else ""
        not_read = "".join(f"; not read: {text}" for text in findings.unread)
        report.lines.append(f"{plugin.key}: rows: {len(source)}{left_out}{not_read}")
        report.lines += [f"  {reason}" for reason in findings.left_out]
        report.num_rows[plugin.key] = len(source)
        report.most_pictures = max(report.most_pictures, findings.most_pictures)
        report.checked.update(findings.checked)
        _, closing = find.attempt(f"{plugin.key}: closing {plugin.name}", source.close)
        report.problems += closing
    return report


# ---- check report --------------------------------------------------------------------------------
# Reports what a config would do, without training and without torch: `rl check config.jsonnet`.


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


def remarks(resolved: Resolved, drops: Iterable[str] = ()) -> dict[str, list[str]]:
    """Title -> lines 'key: why' for keys that have no effect, or probably not the intended one.
    `drops`: as from `dropped`."""
    lines_by_title = {
        "replaced without +, which drops values of the imported file": drops,
        "set, and without effect here": no_effect(resolved),
        "set, and probably a mistake": doubtful(resolved),
    }
    found = {title: list(lines) for title, lines in lines_by_title.items()}
    return {title: lines for title, lines in found.items() if lines}


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
    on_host = memory_plan.host_plan_of(resolved, own_gb, num_ranks)
    misfits = memory_problems(resolved, own_gb)
    return misfits or memory_plan.host_problems(on_host, num_ranks, host_gb)


def smallest_gpu_gb(resolved: Resolved, machine: dist.Machine, num_ranks: int) -> float | None:
    """Memory in GB of the smallest GPU of `machine` that holds a rank's policy; None if none
    does."""
    stated = memory_plan.policy_device(resolved)
    devices = {f"cuda:{rank}" if stated == "auto" else stated for rank in range(num_ranks)}
    sizes_gb = (gb for index, gb in enumerate(machine.cuda_gb) if f"cuda:{index}" in devices)
    return min(sizes_gb, default=None)


def report(
    config: RunConfig,
    gpu_gb: float,
    online: bool = False,
    path: str | Path = "",
    overrides: Sequence[str] = (),
) -> tuple[str, int]:
    """(report, exit code: 1 if there are problems); the report's last lines list them. `online`:
    also ask the judge. `path`, `overrides`: as in `dropped`."""
    try:
        resolved = build.resolve(config)
    except ConfigError as error:
        return _verdict(explained(error.problems, path, overrides), [])
    if unusable := folder_problems(config.run_dir):
        return _verdict(unusable, [])
    state, conflicts = _resume(config)
    data = check_data(resolved)
    num_ranks, pool = min(config.world_size, compatibility.RANKS_OF_A_NODE), config.pool
    host_gb = host_memory_gb() if has_gpus() else None
    on_host = memory_plan.host_plan_of(resolved, gpu_gb, num_ranks)
    unfit = memory_problems(resolved, gpu_gb)
    unfit += memory_plan.host_problems(on_host, num_ranks, host_gb)
    blocks = {
        f"run {config.run_name} in {config.run_dir}: {state}": [],
        "plugins": [
            f"{plugin.key:<20} {plugin.name:<22} {plugin.paths[0]}".rstrip()
            for plugin in resolved.plugins
        ],
        "licences": [f"{part.key:<30} {part.text}" for part in licences(resolved)],
        "placement": list(dist.describe(build.claims(resolved))),
        "batch": _batch_lines(resolved, data.num_rows),
        "data": data.lines,
        f"memory per GPU, against {gpu_gb:g} GB": _memory_lines(resolved, gpu_gb, unfit),
        f"host memory of a machine with {num_ranks} ranks": (
            [f"{part:<30} {gb:.1f} GB" for part, gb in on_host.items()]
            if on_host
            else ["not planned: see above"]
        ),
        **{key: _judge_lines(part) for key, part in resolved.by_judge.items()},
        **({f"render pool: {pool.workers} workers, Ray at {pool.address}": []} if pool else {}),
        "disk": [disk_line(resolved)],
        "this machine": machine_lines(resolved),
    }
    warnings = remarks(resolved, dropped(path, overrides, resolved))
    failures = [*compatibility.compatibility_problems(resolved), *data.problems]
    failures += [*unfit, *conflicts]
    failures += [*machine_problems(resolved), *_audit_problems(resolved)]
    failures = failures or dry_problems(resolved)
    if online and not failures:
        for key, part in resolved.by_judge.items():
            lines, found = _asked_now(part, data.most_pictures)
            blocks[f"{key}, asked now"] = lines
            failures += found if key == "judge" else [f"{key}: {text}" for text in found]
    blocks |= warnings
    verdict, code = _verdict(
        failures, list(memory_plan.unknowns(resolved)), sum(map(len, warnings.values()))
    )
    lines = ["\n  ".join([title, *block]) for title, block in blocks.items()]
    return "\n".join([*lines, verdict]), code


def judge_problems(resolved: Resolved, num_sources: int) -> list[str]:
    """Ask the judge before models are downloaded; [] if there is nothing to download.
    `num_sources`: as in `ask_judge`."""
    main = resolved.by_judge["judge"]
    if (
        not main.needs_judge
        or is_offline()
        or all(is_cached for *_, is_cached in hub_models(resolved))
    ):
        return []
    return _asked_now(main, num_sources, START_PATIENCE_S)[1]


def _asked_now(
    resolved: Resolved, num_sources: int, wait_s: float = 0.0
) -> tuple[list[str], list[str]]:
    """(what the judge's endpoints answered, problems). `wait_s`: time limit of a judge's start."""
    judge = resolved.config.judge
    if not resolved.needs_judge:
        return ["no reward asks it"], []
    if judge.start_command:
        return ["not asked now: the run starts the judge and then asks it"], []
    bases = resolve_api_bases(judge.api_base)
    check = asyncio.run(ask_judge(resolved, bases, wait_s, num_sources=num_sources))
    return check.lines or ["none answered"], check.problems


def _verdict(problems: list[str], unknowns: list[str], num_warnings: int = 0) -> tuple[str, int]:
    if problems:
        return f"{len(problems)} wrong\n{listed(problems)}", 1
    text = "nothing is wrong"
    if unknowns:
        parts = " and ".join(unknown.partition(":")[0] for unknown in unknowns)
        text = f"no mistake found; whether it fits its GPUs is unknown ({parts}: see above)"
    return text + (f"; warnings above: {num_warnings}" if num_warnings else ""), 0


def _batch_lines(resolved: Resolved, num_rows: Mapping[str, int]) -> list[str]:
    config, ranks = resolved.config, resolved.config.world_size
    completions = config.prompts_per_iteration * config.generations_per_prompt
    makes_images = resolved.renderer.cls.makes_images
    answers = completions * config.images_per_completion
    counts = {
        "prompts": config.prompts_per_iteration,
        "completions": completions,
        "pictures": answers if makes_images else 0,
        "judge questions": answers * questions_per_picture(resolved),
    }
    optimizer, policy = config.optimizer, resolved.policy
    per_update = completions / ranks / optimizer.updates_per_iteration
    num_kept, why = memory_plan.kept_tokens(resolved)
    start = policy.cls.start_adapter(policy.config) or "the base model"
    reference = start if config.algorithm.kl_reference == "start" else "the base model"
    if not config.algorithm.kl_coeff:
        reference = "none"
    lines = {
        name: f"{count:>8g} an iteration {count / ranks:>8g} on each of {ranks} ranks"
        for name, count in counts.items()
    } | {
        "optimizer steps": f"{optimizer.updates_per_iteration:>8} an iteration, each of "
        f"{per_update:g} completions a rank",
        "forwards": f"in rows of up to {optimizer.max_tokens_per_micro_batch} tokens; a group has "
        f"at most {memory_plan.group_tokens(resolved)}",
        "kept for backward": f"{num_kept} tokens on each rank, "
        + (f"not all ({why})" if why else "all there can be"),
        "starts from": start,
        "KL reference": reference,
        "whole run": _length(resolved, num_rows),
    }
    return [f"{name:<20} {text}" for name, text in lines.items()]


def _length(resolved: Resolved, num_rows: Mapping[str, int]) -> str:
    """The run's length in iterations and in epochs, if the number of samples is known. `num_rows`:
    that of each data source which has been read."""
    config, counts = resolved.config, [num_rows.get(plugin.key, 0) for plugin in resolved.train]
    if (config.num_iterations is None) == (config.num_epochs is None):
        return "set one of num_iterations and num_epochs"
    if not all(counts):
        unit = "iterations" if config.num_iterations else "epochs"
        return f"{config.num_iterations or config.num_epochs:g} {unit}; a start counts the samples"
    iterations, prompts = build.num_iterations(config, sum(counts)), config.prompts_per_iteration
    return (
        f"{iterations} iterations of {prompts} prompts = {iterations * prompts / sum(counts):.3g} "
        f"epochs of {sum(counts)} samples"
    )


def questions_per_picture(resolved: Resolved) -> int:
    """Judge requests about one picture of training."""
    return sum(
        plugin.cls.num_questions(plugin.config)
        for plugin in resolved.rewards.values()
        if plugin.cls.needs_judge and not plugin.keys.held_out_only
    )


def _judge_lines(resolved: Resolved) -> list[str]:
    config, judge = resolved.config, resolved.config.judge
    if not resolved.needs_judge:
        return ["is not asked"]
    pictures = config.generations_per_prompt * config.images_per_completion
    training = config.prompts_per_iteration * pictures * questions_per_picture(resolved)
    base = judge.api_base if isinstance(judge.api_base, str) else ", ".join(judge.api_base)
    shown = re.sub(r"//[^/,]*@", "//...@", base)
    lines = [f"{judge.model} at {shown or 'the URL that start_command writes'}"]
    lines += [
        f"{name}: {plugin.name}, {plugin.cls.num_questions(plugin.config)} questions a picture"
        for name, plugin in resolved.rewards.items()
        if plugin.cls.needs_judge
    ]
    if judge.audit != "off" and trials.rewards_that_ask(resolved):
        known = trials.verdict(resolved)
        at_start = known.passed is None and judge.audit == "required"
        lines.append("audit: " + ("by the run, at its start" if at_start else known.text))
    in_flight = judge.max_concurrency * config.world_size
    limits = f"up to {in_flight} in flight, {judge.max_attempts} tries each"
    lines.append(f"{training} questions an iteration, {limits}")
    return lines


def _audit_problems(resolved: Resolved) -> Iterator[str]:
    for key, part in resolved.by_judge.items():
        judge = part.config.judge
        verdict = trials.verdict(part) if trials.rewards_that_ask(part) else None
        if judge.audit == "required" and verdict is not None and verdict.passed is False:
            yield f"{key}.audit: {verdict.text}"


def _memory_lines(resolved: Resolved, gpu_gb: float, unfit: Sequence[str]) -> list[str]:
    unknown = [f"unknown: {text}" for text in memory_plan.unknowns(resolved)]
    planned = memory_plan.plan_of(resolved, gpu_gb)
    if planned is None:
        return unknown or [f"not planned: policy.device is {memory_plan.policy_device(resolved)!r}"]
    lines = _table(planned)
    if planned.engine is not None:
        lines.append(memory_plan.engine_line(planned, gpu_gb))
        lines.append(memory_plan.residency_line(planned, gpu_gb))
    free_gb = gpu_gb - planned.peak_gb
    fits = f"{'what is known fits' if unknown else 'fits'} with {free_gb:.1f} GB to spare"
    if unfit:
        fits = f"DOES NOT FIT ({free_gb:.1f} GB free in the fullest phase): see below"
    elif free_gb < gpu_gb * memory_plan.FREE_SHARE:
        fits += ", which is tight (a tenth should stay free)"
    return [*lines, *unknown, fits]


def _table(planned: Plan) -> list[str]:
    """A line for each part, a column for each phase, and the sums."""
    table = [["GB", *PHASES]]
    for item in planned.items:
        gb = f"{item.gb:.1f}"
        table.append([item.part, *(gb if phase in item.phases else "" for phase in PHASES)])
    table.append(["sum", *(f"{planned.total_gb(phase):.1f}" for phase in PHASES)])
    form = f"{{:<{max(len(part) for part, *_ in table)}}}"
    form += "".join(f"{{:>{max(6, len(phase) + 1)}}}" for phase in PHASES)
    return [form.format(*row).rstrip() for row in table]


def _resume(config: RunConfig) -> tuple[str, list[str]]:
    """(what a start does with the run folder, problems that prevent a resume)."""
    checkpoint = find_checkpoint(config.run_dir, hashes=False)
    if checkpoint.problem:
        return "cannot go on", [f"run_name: {checkpoint.problem}"]
    if checkpoint.path is None:
        has_records = (config.run_dir / "metrics.jsonl").is_file()
        return (
            "starts afresh, and sets aside the old records" if has_records else "starts afresh",
            [],
        )
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
