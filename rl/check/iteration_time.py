"""How long an iteration takes with any number of render workers and judges: a closed formula."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from rl.build import Resolved
from rl.check import memory_plan
from rl.check.memory_plan import CONTEXT_GB, PHASES, Sizes
from rl.config.schema import RenderPoolConfig, RunConfig
from rl.meter import LanguageModel, ModelShape, prefix_tree_pairs

# ---- iteration model -----------------------------------------------------------------------------
# Ranks sample, condition their groups, hand batches of pictures to workers (or draw them), and
# learn from groups whose verdicts have arrived. The judge is asked as soon as a picture is drawn.

MOST_WORKERS = 512
WORTH_IT = 0.01
"""Share of an iteration that more workers have to save."""
TIMES = {
    "sample_s": "sampling",
    "condition_s": "conditioning",
    "draw_s": "drawing",
    "judge_s": "the judge",
    "learn_s": "learning",
    "sync_s": "step and sync",
}
"""Field of `Iteration` -> what bounds an iteration if this field does."""


@dataclass(frozen=True)
class Iteration:
    """The work of one iteration, how long its parts take without waiting for others, and who does
    it."""

    num_ranks: int
    num_groups: int
    """Groups of each rank."""
    group_size: int
    """Distinct pictures of a group, that of the bare arm included."""
    batch_size: int
    """Pictures that a GPU draws at once; a rank's last batch may have fewer."""
    questions: int
    """Judge requests about one picture; they may run side by side."""
    sample_s: float
    """A rank's completions."""
    condition_s: float
    """One group, on the rank's GPU."""
    draw_s: float
    """One picture; a batch takes as long as its pictures one by one."""
    judge_s: float
    """One request in one of the judge's slots."""
    learn_s: float
    """One group's share of the optimizer steps, on the rank's GPU."""
    sync_s: float
    """Everything after the last backward: weight sync, records."""
    workers: int = 0
    """GPUs of the pool; 0: the ranks draw the pictures themselves."""
    judge_slots: int = 1
    """Requests that the judges answer at once, each within `judge_s`."""

    @property
    def num_pictures(self) -> int:
        """Pictures of all ranks."""
        return self.num_ranks * self.num_groups * self.group_size

    @property
    def total_s(self) -> float:
        """Seconds of the iteration: every stage takes as long as its slowest resource.

        Left out: the network, pictures that reach the judge all at once, deaths, start-up, held-out
        evaluations, `max_staleness`, and how a GPU slows down in small batches.

        Beside a simulation of the events, before that was deleted, with a link of 10 Gbit/s in
        both: in 220 cases of five shipped configs, median error 0.1 %, 90 % within 7.4 %, worst
        16 %.
        """
        each = self.num_groups * self.group_size
        batch = min(self.batch_size, each)
        batch_s, conditioning_s = batch * self.draw_s, self.num_groups * self.condition_s
        rendered_s = conditioning_s + each * self.draw_s
        if self.workers:
            batches = self.num_ranks * math.ceil(each / batch)
            # Whole rounds, or the mean and a batch less its own share: each batch goes to the first
            # worker that is free, and a rank's last one may be small.
            mean_s = self.num_pictures * self.draw_s / self.workers
            uneven_s = mean_s + batch_s * (1 - 1 / self.workers)
            drawing_s = min(math.ceil(batches / self.workers) * batch_s, uneven_s)
            rendered_s = max(conditioning_s + batch_s, self.condition_s + drawing_s)
        judging_s = self.num_pictures * self.questions * self.judge_s / self.judge_slots
        last_s = math.ceil(self.questions / self.judge_slots) * self.judge_s
        graded_s = max(rendered_s + last_s, self.condition_s + batch_s + judging_s)
        learnt_s = max(rendered_s + self.num_groups * self.learn_s, graded_s + self.learn_s)
        return self.sample_s + learnt_s + self.sync_s


def bound_by(work: Iteration) -> str:
    """What bounds the iteration: the part that, if 10 % faster, shortens the iteration most."""

    def seconds(name: str) -> float:
        return replace(work, **{name: 0.9 * getattr(work, name)}).total_s

    return TIMES[min(TIMES, key=seconds)]


def enough_workers(work: Iteration) -> int:
    """The number of workers beyond which all further ones (up to `MOST_WORKERS`) together save less
    than `WORTH_IT` of the iteration; 0 if no pool saves that."""

    def is_enough(workers: int) -> bool:
        return replace(work, workers=workers).total_s * (1 - WORTH_IT) < least_s

    least_s = replace(work, workers=MOST_WORKERS).total_s
    if is_enough(0):
        return 0
    return 1 + bisect.bisect_left(range(1, MOST_WORKERS), True, key=is_enough)


# ---- phase times ---------------------------------------------------------------------------------
# Computes the times of an iteration's phases from a config's FLOPs.

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


def computed(resolved: Resolved) -> Iteration:
    """Times from FLOPs, of a GPU with about `gpu_gb` of memory: for prompts as long as allowed and
    completions half as long, judged by one 32B in 8 bits on one H100. Raises ValueError if a
    model's size is unknown, or the config draws no pictures."""
    config, renderer = resolved.config, resolved.renderer
    if not renderer.cls.makes_images:
        raise ValueError(f"renderer: {renderer.name} draws no pictures")
    gpu, sizes = gpu_of(config.gpu_gb), memory_plan.sizes(resolved)
    drawing = renderer.cls.cost(renderer.config).picture_flops
    if sizes is None or drawing is None:
        key = "policy" if sizes is None else "renderer"
        raise ValueError(f"{key}: the size of this model is unknown")
    length, rate = COMPLETION_SHARE * sizes.completion_tokens, POLICY * gpu.flops
    read, learn = group_flops(config, sizes, length)
    arms = config.generations_per_prompt + (config.bare_arm == "always")
    return Iteration(
        num_ranks=config.world_size,
        num_groups=config.prompts_per_iteration // config.world_size,
        group_size=arms * config.images_per_completion,
        batch_size=getattr(renderer.config, "batch_size", 1),
        questions=questions_per_picture(resolved),
        sample_s=sampling_s(sizes, length, gpu, config.gpu_gb),
        condition_s=read / rate,
        draw_s=drawing / (PICTURES * gpu.flops),
        judge_s=JUDGE_FLOPS / JUDGE_FLOPS_S,
        learn_s=learn / rate,
        sync_s=sizes.trained_params * sizes.bytes_per_weight / PCIE_BYTES_S,
    )


def questions_per_picture(resolved: Resolved, held_out: bool = False) -> int:
    """Judge requests about one picture of training, or also of evaluation."""
    rewards = (
        plugin
        for plugin in resolved.rewards.values()
        if plugin.cls.needs_judge and (held_out or not plugin.keys.held_out_only)
    )
    return sum(plugin.cls.num_questions(plugin.config) for plugin in rewards)


def sampling_s(sizes: Sizes, length: float, gpu: Gpu, gpu_gb: float) -> float:
    """Seconds in which a rank's engine samples an iteration's completions, sleeps and wakes."""
    planned = memory_plan.plan(sizes, gpu_gb)
    engine = planned.inference
    if engine is None or planned.engine is None:
        raise ValueError("engine: its time is not planned, only vLLM's")
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


# ---- pool report ---------------------------------------------------------------------------------
# Lines of `rl check` about a pool of render workers.


def pool_lines(resolved: Resolved) -> list[str]:
    """Memory of a worker, and what the config's workers and more of them save."""
    pool = resolved.config.pool
    assert pool is not None
    workers = None if pool.workers == "auto" else pool.workers
    lines = [f"{pool.workers} workers, Ray at {pool.address}"]
    drawn_by_ranks = resolved.config.model_copy(update={"render_pool": RenderPoolConfig()})
    on_a_rank = replace(resolved, config=drawn_by_ranks)
    if planned := memory_plan.footprint(on_a_rank, resolved.config.gpu_gb):
        renderer = [row.gb for row in planned.rows if row.part.startswith(resolved.renderer.key)]
        lines.append(f"a worker takes {CONTEXT_GB + sum(renderer):.1f} GB of its GPU")
    try:
        work = computed(resolved)
    except ValueError as error:
        return [*lines, f"time not planned: {error}"]
    enough = enough_workers(work)
    lines.append(
        f"an iteration, computed for {gpu_of(resolved.config.gpu_gb).name}s at {PICTURES:.0%} "
        f"(pictures) and {POLICY:.0%} (policy) of their rate:"
    )
    for number in sorted({0, enough} | ({workers} if workers else set())):
        with_them = replace(work, workers=number)
        where = f"with {number} workers" if number else "without a pool"
        lines.append(f"  {with_them.total_s:.4g} s {where}; {bound_by(with_them)} bounds it")
    return [*lines, f"beyond {enough} workers, further ones together save less than {WORTH_IT:.0%}"]
