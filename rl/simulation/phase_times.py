"""Computes the times of an iteration's phases, from a config's FLOPs or from a finished run."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median
from typing import NamedTuple

from rl.build import Resolved
from rl.config.schema import RunConfig
from rl.files import read_object, read_rows
from rl.memory import footprint, memory_plan
from rl.memory.memory_plan import PHASES, Sizes
from rl.meter import LanguageModel, ModelShape, prefix_tree_pairs
from rl.simulation.iteration_model import Iteration

PICTURES, POLICY = 0.5, 0.25
"""Shares of a GPU's FLOP rate that an H100 reached (benchmarks/results/gpu.md): the whole phase
`render` of Qwen-Image-Edit at 512 px with 4 steps, 49 %; a step of a 7B policy, 26 %."""
ASSUMED = 0.4
"""The share that sampling (of memory bandwidth) and the judge reach; nobody has measured it."""
COMPLETION_SHARE = 0.5
"""Assumed mean length of a completion divided by its limit."""
VOCABULARY = 151_936
PATCHES_PER_TOKEN = 4
"""Patches that the vision tower merges into one token."""
PCIE_BYTES_S = 20e9
STATE_BYTES = 2
"""Of a hidden state's value on its way to a worker (bfloat16)."""
JUDGE_FLOPS = 2 * 33.4e9 * 2000
"""FLOPs of a question to Qwen3-VL-32B: about 2,000 tokens of pictures, question and reply."""


class Gpu(NamedTuple):
    """Dense bfloat16 FLOPs and bytes of memory per second."""

    name: str
    flops: float
    bandwidth: float
    gb: float


H100 = Gpu("H100", 790e12, 3.35e12, 80)
JUDGE_FLOPS_S = ASSUMED * 2 * H100.flops
"""The judge computes in 8 bits on one H100, at twice the rate of bfloat16."""
GPUS = (
    Gpu("RTX 4090", 165e12, 1.0e12, 24),
    Gpu("L40S", 362e12, 0.86e12, 48),
    H100,
    Gpu("H200", 790e12, 4.8e12, 141),
)


def gpu_of(gpu_gb: float) -> Gpu:
    """The known GPU whose memory is nearest to a config's `gpu_gb`."""
    return min(GPUS, key=lambda gpu: abs(gpu.gb - gpu_gb))


@dataclass(frozen=True)
class Times:
    """An iteration's times and their source."""

    iteration: Iteration
    slots_per_judge: int
    """Requests that one judge answers at once, each within `judge_s`."""
    source: str
    measured_s: float | None = None
    """Of the run's whole iteration; None if the times are computed."""


def computed(resolved: Resolved) -> Times:
    """Times from FLOPs, of a GPU with about `gpu_gb` of memory: for prompts as long as allowed and
    completions half as long, judged by a 32B in 8 bits on one H100. Raises ValueError if a model's
    size is unknown."""
    config, gpu, work = resolved.config, gpu_of(resolved.config.gpu_gb), _work(resolved)
    sizes = footprint.sizes(resolved)
    drawing = resolved.renderer.cls.picture_flops(resolved.renderer.config)
    if sizes is None or drawing is None:
        key = "policy" if sizes is None else "renderer"
        raise ValueError(f"{key}: the size of this model is unknown; give --run with a run of it")
    length, rate = COMPLETION_SHARE * sizes.completion_tokens, POLICY * gpu.flops
    read, learn = group_flops(config, sizes, length)
    iteration = Iteration(
        **work,
        sample_s=sampling_s(sizes, length, gpu, config.gpu_gb),
        condition_s=read / rate,
        draw_s=drawing / (PICTURES * gpu.flops),
        judge_s=JUDGE_FLOPS / JUDGE_FLOPS_S,
        learn_s=learn / rate,
        sync_s=sizes.trained_params * sizes.bytes_per_weight / PCIE_BYTES_S,
        picture_bytes=_picture_bytes(resolved, sizes.prompt_tokens + length),
    )
    source = f"computed for {gpu.name}s at {PICTURES:.0%} (pictures) and {POLICY:.0%} (policy)"
    return Times(iteration, 1, f"{source} of their rate")


def measured(resolved: Resolved, run_dir: Path) -> Times:
    """Medians of a run whose ranks drew the pictures themselves. `resolved`: a config with as many
    ranks, prompts and completions. Raises ValueError if it differs, or the run has no times."""
    stored = read_object(run_dir / "config.json") or {}
    config = resolved.config.model_dump(mode="json")
    for key in ("world_size", "prompts_per_iteration", "generations_per_prompt", "bare_arm"):
        if stored.get(key) != config[key]:
            raise ValueError(
                f"{key}: {stored.get(key)} in {run_dir}, {config[key]} here; it differs"
            )
    if (stored.get("render_pool") or {}).get("workers"):
        raise ValueError(f"{run_dir}: a pool drew its pictures; name a run whose ranks drew them")
    rows, _ = read_rows(run_dir / "metrics.jsonl")
    rows = [row for row in rows if row.get("time/render_s")][1:]  # the first one also warms up
    if not rows:
        raise ValueError(f"{run_dir}/metrics.jsonl has not two iterations with rendered pictures")

    def typical(*names: str) -> float:
        return sum(median([float(row.get(name) or 0) for row in rows]) for name in names)

    work = _work(resolved)
    groups = work["num_groups"]
    tokens = typical("tokens/prompt_mean", "tokens/completion_mean")
    iteration = Iteration(
        **work,
        sample_s=typical("time/prompts_s", "time/generate_s"),
        condition_s=typical("time/condition_s") / groups,
        draw_s=typical("time/render_s") / (groups * work["group_size"]),
        judge_s=typical("judge/latency_p50_s"),
        learn_s=typical("time/learn_s") / groups,
        sync_s=typical("time/sync_s", "time/record_s"),
        picture_bytes=_picture_bytes(resolved, tokens),
    )
    slots = resolved.config.judge.max_concurrency * resolved.config.world_size
    source = f"medians of {len(rows)} iterations of {run_dir}"
    return Times(iteration, slots, source, typical("time/iteration_s"))


def _work(resolved: Resolved) -> dict[str, int]:
    """The fields of `Iteration` that count. Raises ValueError if the config draws no pictures."""
    if not resolved.renderer.cls.makes_images:
        raise ValueError(f"renderer: {resolved.renderer.name} draws no pictures")
    config = resolved.config
    arms = config.generations_per_prompt + (config.bare_arm == "always")
    rewards = (
        plugin
        for plugin in resolved.rewards.values()
        if plugin.cls.needs_judge and not plugin.keys.held_out_only
    )
    return {
        "num_ranks": config.world_size,
        "num_groups": config.prompts_per_iteration // config.world_size,
        "group_size": arms * config.images_per_completion,
        "batch_size": getattr(resolved.renderer.config, "batch_size", 1),
        "questions": sum(plugin.cls.num_questions(plugin.config) for plugin in rewards),
    }


def _picture_bytes(resolved: Resolved, tokens: float) -> float:
    """Bytes to and from a worker for one picture: a row of `tokens` hidden states, if the renderer
    reads them; a source; and the picture in 8-bit RGB."""
    renderer = resolved.renderer
    width = renderer.cls.state_dim_of(renderer.config) or 0
    area_px = getattr(renderer.config, "output_area_px", 1024 * 1024)
    return STATE_BYTES * width * tokens + 2 * 3 * area_px


def sampling_s(sizes: Sizes, length: float, gpu: Gpu, gpu_gb: float) -> float:
    """Seconds in which a rank's engine samples an iteration's completions, sleeps and wakes."""
    planned = memory_plan.plan(sizes, gpu_gb)
    engine = planned.inference
    if engine is None or planned.engine is None:
        raise ValueError("engine: its time is not planned, only vLLM's; give --run")
    at_once = min(sizes.num_completions, engine.max_num_seqs, int(engine.at_once(gpu_gb)))
    num_steps = math.ceil(sizes.num_completions / at_once) * length
    tokens = sizes.prompt_tokens + length / 2
    num_bytes = engine.weights_gb * 1e9 + at_once * tokens * engine.kv_bytes
    step_s = max(num_bytes / gpu.bandwidth, at_once * 2 * sizes.model.params / gpu.flops)
    asleep_s = 2 * engine.weights_gb * 1e9 / PCIE_BYTES_S
    sleeps = planned.engine.phases != PHASES
    return num_steps * step_s / ASSUMED + (asleep_s if sleeps else 0)


def group_flops(config: RunConfig, sizes: Sizes, length: float) -> tuple[float, float]:
    """FLOPs of the policy for one group: (vision tower, prefill and forward; backward, what it
    computes again, and the reference)."""
    shape = {field.name: getattr(sizes.model, field.name) for field in fields(ModelShape)}
    rank, modules = sizes.lora_rank or 0, tuple(sizes.lora_modules)
    model = LanguageModel(**shape, vocabulary=VOCABULARY, lora_rank=rank, lora_targets=modules)
    prompt, lengths = sizes.prompt_tokens, [int(length)] * config.generations_per_prompt
    tokens, pairs = prompt + sum(lengths), prefix_tree_pairs(prompt, lengths)
    head = model.head_flops(sum(lengths))
    forward = model.forward_flops(tokens, pairs) + head
    read = forward + model.forward_flops(prompt, prefix_tree_pairs(prompt, []))
    read += 2 * sizes.model.tower_params * PATCHES_PER_TOKEN * prompt
    mlps = 6 * model.num_layers * model.width * model.mlp_width * tokens
    recomputed = {False: 0.0, "mlp": mlps, True: forward}[sizes.checkpointing]
    learn = recomputed + model.backward_flops(tokens, pairs) + (1 if rank else 2) * head
    return read, learn + forward * (config.algorithm.kl_coeff > 0)
