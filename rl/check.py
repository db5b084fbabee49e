"""What a config would do, without doing it: `python -m rl.simple_launch --check config.jsonnet`.

What: `problems` (everything wrong, asked quietly before every launch) and `report` (the same aloud,
with the batch arithmetic, the memory plan and what the judge will be asked). What not: the rules
themselves (`build.py`, `validation.py`) and sizes (`footprint.py`). No torch, no vLLM, no GPU:
seconds on a laptop.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from rl import build, fit, footprint
from rl.config import ConfigError, RunConfig, listed
from rl.system import memory_plan, placement
from rl.system.checkpoint import find
from rl.system.memory_plan import PHASES, Plan
from rl.system.resume import check_resume
from rl.system.scrub import scrubbed


def problems(config: RunConfig) -> list[str]:
    """Everything that keeps this config from running, each with its key and remedy."""
    try:
        resolved = build.resolve(config)
    except ConfigError as error:
        return list(error.problems)
    return fit.fit_problems(resolved) + _resume(config)[1]


def report(config: RunConfig, gpu_gb: float) -> int:
    """Print what the run would be; returns the exit code, 1 when something is wrong."""
    try:
        resolved = build.resolve(config)
    except ConfigError as error:
        return _print_problems(list(error.problems))
    state, conflicts = _resume(config)
    _print_block(f"run {config.run_name} in {config.run_dir}: {state}", [])
    _print_block("plugs", _plug_lines(resolved))
    _print_block("placement", placement.describe(build.claims(resolved)))
    _print_block("batch", _batch_lines(resolved))
    _print_block(f"memory per GPU, against {gpu_gb:g} GB", _memory_lines(resolved, gpu_gb))
    _print_block("judge", _judge_lines(resolved))
    return _print_problems(fit.fit_problems(resolved) + conflicts)


def _print_block(title: str, lines: Iterable[str]) -> None:
    print(title, *(f"  {line}" for line in lines), sep="\n")


def _print_problems(found: list[str]) -> int:
    if not found:
        print("nothing is wrong")
        return 0
    print(f"{len(found)} wrong", listed(found), sep="\n")
    return 1


def _plug_lines(resolved: build.Resolved) -> list[str]:
    plugs = [resolved.policy, resolved.engine, resolved.renderer]
    plugs += [*resolved.rewards.values(), *resolved.train, *resolved.validation]
    return [
        f"{plug.key:<20} {plug.name:<22} {footprint.origin(plug.config)}".rstrip() for plug in plugs
    ]


def _batch_lines(resolved: build.Resolved) -> list[str]:
    config, ranks = resolved.config, resolved.config.world_size
    prompts = config.prompts_per_iteration
    completions = prompts * config.generations_per_prompt
    pictures = completions * config.images_per_completion
    if not resolved.renderer.module.MAKES_IMAGES:
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
    counts = [plug.module.count(plug.config) for plug in resolved.train]
    prompts = config.prompts_per_iteration
    if any(count is None for count in counts):
        if config.num_epochs is not None:
            return f"{config.num_epochs:g} epochs; iterations are known once the data is loaded"
        return f"{config.num_iterations} iterations; epochs are known once the data is loaded"
    num_samples = sum(counts)
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
        plug.module.num_questions(plug.config)
        for plug in resolved.rewards.values()
        if plug.module.NEEDS_JUDGE
    )


def _judge_lines(resolved: build.Resolved) -> list[str]:
    config, judge = resolved.config, resolved.config.judge
    per_picture = _questions_per_picture(resolved)
    if not per_picture:
        return ["is not asked"]
    pictures = config.generations_per_prompt * config.images_per_completion
    training = config.prompts_per_iteration * pictures * per_picture
    lines = [f"{judge.model} at {judge.api_base}"]
    lines += [
        f"{name}: {plug.name}, {plug.module.num_questions(plug.config)} questions a picture"
        for name, plug in resolved.rewards.items()
        if plug.module.NEEDS_JUDGE
    ]
    lines.append(
        f"{training} questions an iteration: {training * 60} an hour at one iteration a minute; up "
        f"to {judge.max_concurrency * config.world_size} in flight, {judge.max_attempts} tries each"
    )
    if config.evaluation.every_n_iterations:
        runs = 2 if config.evaluation.reference_drift else 1
        held_out = config.evaluation.num_samples * config.images_per_completion * per_picture
        every = config.evaluation.every_n_iterations
        lines.append(f"held-out run: up to {held_out * runs} more every {every} iterations")
    return lines


def _memory_lines(resolved: build.Resolved, gpu_gb: float) -> list[str]:
    planned = footprint.footprint(resolved, gpu_gb)
    if planned is None:
        return [
            f"unknown: {footprint.origin(resolved.policy.config)} is neither a local folder nor "
            f"one of {', '.join(memory_plan.KNOWN)}"
        ]
    lines = [f"{'GB':<28}" + "".join(f"{phase:>10}" for phase in PHASES)]
    for row in planned.rows:
        cells = (f"{row.gb:>10.2f}" if phase in row.phases else f"{'':>10}" for phase in PHASES)
        lines.append(f"{row.part:<28}" + "".join(cells))
    totals = "".join(f"{planned.total_gb(phase):>10.2f}" for phase in PHASES)
    lines += [f"{'sum':<28}{totals}", *(f"assumed: {text}" for text in planned.assumptions)]
    if planned.engine is not None:
        lines.append(memory_plan.residency_line(planned, gpu_gb))
    return [*lines, _verdict(planned, gpu_gb)]


def _verdict(planned: Plan, gpu_gb: float) -> str:
    free_gb = gpu_gb - planned.peak_gb
    if free_gb < 0:
        return (
            f"DOES NOT FIT by {-free_gb:.1f} GB; what helps: optimizer.gradient_checkpointing, a "
            "smaller optimizer.max_kept_tokens, optimizer.max_tokens_per_micro_batch, "
            "renderer.batch_size or engine.gpu_memory_utilization, renderer.device on another GPU"
        )
    tight = ", which is tight (a tenth should stay free)" if free_gb < gpu_gb / 10 else ""
    return f"fits with {free_gb:.1f} GB to spare{tight}"


def _resume(config: RunConfig) -> tuple[str, list[str]]:
    """(state of the run folder in words, what forbids to go on from it)."""
    found = find(config.run_dir, hashes=False)
    if found.problem:
        return "has no whole checkpoint", [f"run_name: {found.problem}"]
    if found.path is None:
        recorded = (config.run_dir / "metrics.jsonl").is_file()
        return "starts afresh" + (", and sets aside what is recorded there" * recorded), []
    state = json.loads((found.path / "state.json").read_text(encoding="utf-8"))
    today = scrubbed(config.model_dump(mode="json"), (config.judge.api_key_env,))
    words = "; ".join((f"goes on after {state['iteration']} iterations", *found.remarks))
    try:
        noted = check_resume(state["meta"]["config"], today)
    except ValueError as error:
        return words, [f"run_name: {error}"]
    return words + (f" (changed: {', '.join(noted)})" if noted else ""), []
