"""What a config would do, without doing it: `python -m rl.simple_launch --check config.jsonnet`.

What: `problems` (everything wrong, asked quietly before every launch) and `report` (the same aloud,
with the batch arithmetic, the memory plan and what the judge will be asked). What not: the rules
themselves (`build.py`, `validation.py`). No torch, no vLLM, no GPU: seconds on a laptop.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rl import build, fit
from rl.config import ConfigError, RunConfig, listed
from rl.system import memory_plan, placement
from rl.system.checkpoint import problem_of
from rl.system.memory_plan import PHASES, FrozenModel, LanguageModel, Plan, Sizes
from rl.system.resume import check_resume
from rl.system.scrub import scrubbed
from rl.system.weight_files import num_parameters

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


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
    return [f"{plug.key:<20} {plug.name:<22} {_origin(plug.config)}".rstrip() for plug in plugs]


def _origin(config: Any) -> str:
    """The model or data a plug reads, where its section names one."""
    names = ("init_text_encoder_from", "model_path", "path")
    return next((value for name in names if (value := getattr(config, name, ""))), "")


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

    optimizer = config.optimizer
    per_update = completions / ranks / optimizer.updates_per_iteration
    micro_batches = math.ceil(per_update / optimizer.micro_batch_size)
    return [
        row("prompts", prompts),
        row("completions", completions),
        row("pictures", pictures),
        row("judge questions", questions),
        f"{'optimiser steps':<20} {optimizer.updates_per_iteration:>8} an iteration, each of "
        f"{per_update:g} completions a rank in {micro_batches} micro-batches of up to "
        f"{optimizer.micro_batch_size}",
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
    sizes = _sizes(resolved)
    if sizes is None:
        return [
            f"unknown: {_origin(resolved.policy.config)} is neither a local folder nor one of "
            f"{', '.join(memory_plan.KNOWN)}"
        ]
    planned = memory_plan.plan(sizes, gpu_gb)
    lines = [f"{'GB':<28}" + "".join(f"{phase:>10}" for phase in PHASES)]
    for row in planned.rows:
        cells = (f"{row.gb:>10.2f}" if phase in row.phases else f"{'':>10}" for phase in PHASES)
        lines.append(f"{row.part:<28}" + "".join(cells))
    totals = "".join(f"{planned.total_gb(phase):>10.2f}" for phase in PHASES)
    lines += [f"{'sum':<28}{totals}", *(f"assumed: {text}" for text in planned.assumptions)]
    return [*lines, _verdict(planned, gpu_gb)]


def _verdict(planned: Plan, gpu_gb: float) -> str:
    free_gb = gpu_gb - planned.peak_gb
    if free_gb < 0:
        return (
            f"DOES NOT FIT by {-free_gb:.1f} GB; what helps: a smaller renderer.batch_size, "
            "optimizer.micro_batch_size or engine.gpu_memory_utilization, "
            "optimizer.gradient_checkpointing, renderer.device on another GPU"
        )
    tight = ", which is tight (a tenth should stay free)" if free_gb < gpu_gb / 10 else ""
    return f"fits with {free_gb:.1f} GB to spare{tight}"


def _sizes(resolved: build.Resolved) -> Sizes | None:
    """What the plan needs to know. Keys that only some plugs have are read where they are there."""
    config, optimizer = resolved.config, resolved.config.optimizer
    policy, engine = resolved.policy.config, resolved.engine.config
    model = _language_model(_origin(policy)) or _language_model(getattr(policy, "model_path", ""))
    if model is None:
        return None
    lora = getattr(policy, "lora", None)
    return Sizes(
        model=model,
        bytes_per_weight=BYTES[getattr(policy, "dtype", "bfloat16")],
        lora_rank=lora.r if lora else None,
        lora_modules=lora.target_modules if lora else (),
        zero_stage=optimizer.zero_stage if optimizer.backend == "deepspeed" else 0,
        world_size=config.world_size,
        micro_batch_size=optimizer.micro_batch_size,
        prompt_tokens=getattr(policy, "max_prompt_tokens", 2048),
        completion_tokens=config.sampling.max_completion_tokens,
        checkpointing=optimizer.gradient_checkpointing,
        engine_share=getattr(engine, "gpu_memory_utilization", None),
        engine_sleeps=getattr(engine, "sleep_level", 0) > 0,
        max_num_seqs=getattr(engine, "max_num_seqs", 1),
        reads_reference=lora is None and config.algorithm.kl_coeff > 0,
        frozen=[
            _frozen(plug, getattr(policy, "device", "auto"))
            for plug in (resolved.renderer, *resolved.rewards.values())
        ],
    )


def _frozen(plug: build.Plug, own_device: str) -> FrozenModel:
    """A plug that runs a model of its own says how large it is; one that runs none says nothing."""
    counts: list[dict[str, float]] = [
        getattr(plug.module, name, lambda config: {})(plug.config)
        for name in ("parameter_counts", "activation_counts")
    ]
    device = getattr(plug.config, "device", "auto")
    return FrozenModel(
        name=plug.key,
        device="auto" if device == own_device else device,
        bytes_per_value=BYTES[getattr(plug.config, "dtype", "bfloat16")],
        weights=counts[0],
        activations=counts[1],
    )


def _language_model(path: str) -> LanguageModel | None:
    """Shape by hub id, or from a local folder's config.json and safetensors headers."""
    file = Path(path) / "config.json"
    if not path or not file.is_file():
        return memory_plan.KNOWN.get(path)
    values = json.loads(file.read_text(encoding="utf-8"))
    text = values.get("text_config", values)
    heads = text["num_attention_heads"]
    return LanguageModel(
        layers=text["num_hidden_layers"],
        hidden=text["hidden_size"],
        ffn=text["intermediate_size"],
        heads=heads,
        kv_heads=text.get("num_key_value_heads", heads),
        head_dim=text.get("head_dim") or text["hidden_size"] // heads,
        params=num_parameters(path),
    )


def _resume(config: RunConfig) -> tuple[str, list[str]]:
    """(state of the run folder in words, what forbids to go on from it)."""
    steps = sorted((config.run_dir / "checkpoints").glob("step_*"))
    whole = [step for step in steps if problem_of(step, hashes=False) is None]
    if not steps:
        return "starts afresh", []
    if not whole:
        return "has no whole checkpoint", [
            f"run_name: none of the {len(steps)} checkpoints in {config.run_dir} is whole; restore "
            "one, or choose another run_name"
        ]
    state = json.loads((whole[-1] / "state.json").read_text(encoding="utf-8"))
    today = scrubbed(config.model_dump(mode="json"), (config.judge.api_key_env,))
    words = f"goes on after {state['iteration']} iterations"
    try:
        noted = check_resume(state["meta"]["config"], today)
    except ValueError as error:
        return words, [f"run_name: {error}"]
    return words + (f" (changed: {', '.join(noted)})" if noted else ""), []
