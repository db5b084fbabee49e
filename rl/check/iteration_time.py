"""How long an iteration takes with any number of render workers and judges."""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

from rl.build import Resolved
from rl.check import memory_plan
from rl.check.memory_plan import CONTEXT_GB, PHASES, Sizes
from rl.config.schema import RenderPoolConfig, RunConfig
from rl.files import read_object, read_rows
from rl.meter import LanguageModel, ModelShape, prefix_tree_pairs

# ---- iteration model -----------------------------------------------------------------------------
# Simulates one iteration of a run with any number of render workers and judges.
#
# Ranks sample, condition their groups, hand batches of pictures to workers (or draw them), and
# learn from groups whose verdicts have arrived. The judge is asked as soon as a picture is drawn.

WINDOW = 2
"""Batches that a worker holds at most: the one that it draws, and the next."""
MOST_WORKERS = 512
WORTH_IT = 0.01
"""Share of an iteration that more workers have to save."""
TIMES = {
    "sample_s": "sampling",
    "condition_s": "conditioning",
    "draw_s": "drawing",
    "picture_bytes": "the network",
    "judge_s": "the judge",
    "learn_s": "learning",
    "sync_s": "step and sync",
}
"""Field of `Iteration` -> what bounds an iteration if this field does."""


@dataclass(frozen=True)
class Iteration:
    """The work of one iteration and how long its parts take, without waiting for others."""

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
    picture_bytes: float = 0.0
    """Sent for one picture drawn by a worker: states, and the picture back."""
    ranks_per_node: int = 8

    @property
    def num_pictures(self) -> int:
        """Pictures of one rank."""
        return self.num_groups * self.group_size


@dataclass(frozen=True)
class Machines:
    """What works beside the ranks."""

    workers: int = 0
    """GPUs of the pool; 0: the ranks draw the pictures themselves."""
    judge_slots: int = 1
    """Requests that the judges answer at once, each within `judge_s`."""
    bytes_per_s: float = 1.25e9
    """Between each node of ranks and the workers."""
    local: bool = False
    """Whether the ranks draw pictures beside the workers."""


@dataclass(frozen=True)
class Outcome:
    """A simulated iteration, in seconds."""

    total_s: float
    phases_s: Mapping[str, float]
    """Of the rank that ends last, waits included, by the names of `time/<phase>_s`; their sum is
    `total_s`."""
    worker_use: float
    """Share of the time in which a worker draws, 0 to 1; 0 without workers."""
    judge_use: float
    """The same of a judge's slot."""


@dataclass(eq=False)
class _Rank:
    work: Iteration
    node: int
    num_conditioned: int = 0
    """Groups."""
    num_taken: int = 0
    """Pictures that are being drawn, or that are drawn."""
    num_drawn: int = 0
    is_busy: bool = False
    rendered_s: float = 0.0
    graded_s: list[float] = field(default_factory=list)
    """When the last verdict of each group arrived."""

    def next_batch(self) -> range:
        """The pictures of the next batch, if they are conditioned; else an empty range."""
        work, ready = self.work, self.num_conditioned * self.work.group_size
        end = min(self.num_taken + work.batch_size, work.num_pictures)
        return range(self.num_taken, end if end <= ready else self.num_taken)


class _Simulation:
    def __init__(self, work: Iteration, machines: Machines) -> None:
        self.work, self.machines, self.now_s = work, machines, work.sample_s
        self.ranks = [
            _Rank(work, number // work.ranks_per_node, graded_s=[0.0] * work.num_groups)
            for number in range(work.num_ranks)
        ]
        self.links_s: dict[int, float] = defaultdict(float)
        """Node -> when its link is free."""
        self.workers = [(0, 0.0, number) for number in range(machines.workers)]
        """(batches held, when all of them are drawn, number)."""
        self.least_busy = list(self.workers)
        """Heap of `workers`, with outdated entries."""
        self.num_drawn_remotely = 0
        self.slots_s = [0.0] * machines.judge_slots
        """Heap: when each slot of the judge is free."""
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def run(self) -> None:
        """Simulate until the judge has graded every picture."""
        self._feed()
        while self._events:
            self.now_s, _, event = heapq.heappop(self._events)
            event()
            self._feed()

    def _at(self, time_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), event))

    def _feed(self) -> None:
        """Give work to everyone who has none; the rank with the fewest pictures taken is first."""
        started = True
        while started:
            started = False
            for rank in sorted(self.ranks, key=lambda rank: rank.num_taken):
                started |= self._started(rank)

    def _started(self, rank: _Rank) -> bool:
        """Starts the next piece of a rank's work if a GPU can take it."""
        worker = self._free_worker()
        batch = rank.next_batch()
        draws = self.machines.local or not self.machines.workers
        if batch and worker is not None:
            self._send(rank, batch, worker)
        elif rank.is_busy or (worker is None and not draws):
            return False
        elif batch:
            rank.is_busy = True
            rank.num_taken = batch.stop
            end_s = self.now_s + len(batch) * self.work.draw_s
            self._at(end_s, lambda: self._drawn(rank, batch, None))
        elif rank.num_conditioned < self.work.num_groups:
            rank.is_busy = True
            self._at(self.now_s + self.work.condition_s, lambda: self._conditioned(rank))
        else:
            return False
        return True

    def _free_worker(self) -> int | None:
        """The worker with the fewest batches, and of these the one that is done first."""
        heap = self.least_busy
        while heap and heap[0] != self.workers[heap[0][2]]:
            heapq.heappop(heap)
        return heap[0][2] if heap and heap[0][0] < WINDOW else None

    def _hold(self, worker: int, batches: int, done_s: float) -> None:
        self.workers[worker] = (self.workers[worker][0] + batches, done_s, worker)
        heapq.heappush(self.least_busy, self.workers[worker])

    def _send(self, rank: _Rank, batch: range, worker: int) -> None:
        sent_s = len(batch) * self.work.picture_bytes / self.machines.bytes_per_s
        arrival_s = max(self.now_s, self.links_s[rank.node]) + sent_s
        self.links_s[rank.node] = arrival_s
        end_s = max(arrival_s, self.workers[worker][1]) + len(batch) * self.work.draw_s
        self._hold(worker, 1, end_s)
        rank.num_taken = batch.stop
        self._at(end_s, lambda: self._drawn(rank, batch, worker))

    def _conditioned(self, rank: _Rank) -> None:
        rank.is_busy = False
        rank.num_conditioned += 1

    def _drawn(self, rank: _Rank, batch: range, worker: int | None) -> None:
        if worker is None:
            rank.is_busy = False
        else:
            self._hold(worker, -1, self.workers[worker][1])
            self.num_drawn_remotely += len(batch)
        rank.num_drawn += len(batch)
        if rank.num_drawn == self.work.num_pictures:
            rank.rendered_s = self.now_s
        for picture in batch:
            group = picture // self.work.group_size
            rank.graded_s[group] = max(rank.graded_s[group], self._verdict_s())

    def _verdict_s(self) -> float:
        """When the judge has answered all questions about a picture that is drawn now."""
        end_s = self.now_s
        for _ in range(self.work.questions):
            answered_s = max(self.now_s, self.slots_s[0]) + self.work.judge_s
            heapq.heapreplace(self.slots_s, answered_s)
            end_s = max(end_s, answered_s)
        return end_s


def simulate(work: Iteration, machines: Machines) -> Outcome:
    """One iteration. A rank learns after it has rendered, group by group in their order."""
    simulation = _Simulation(work, machines)
    simulation.run()
    ends_s = []
    for rank in simulation.ranks:
        now_s = rank.rendered_s
        for graded_s in rank.graded_s:
            now_s = max(now_s, graded_s) + work.learn_s
        ends_s.append(now_s)
    end_s = max(ends_s)
    last = simulation.ranks[ends_s.index(end_s)]
    total_s = end_s + work.sync_s
    conditioning_s, learning_s = (work.num_groups * s for s in (work.condition_s, work.learn_s))
    pictures = work.num_ranks * work.num_pictures
    return Outcome(
        total_s,
        {
            "generate": work.sample_s,
            "condition": conditioning_s,
            "render": last.rendered_s - work.sample_s - conditioning_s,
            "judge_wait": end_s - last.rendered_s - learning_s,
            "learn": learning_s,
            "sync": work.sync_s,
        },
        simulation.num_drawn_remotely * work.draw_s / (total_s * max(1, machines.workers)),
        pictures * work.questions * work.judge_s / (total_s * machines.judge_slots),
    )


def bound_by(work: Iteration, machines: Machines) -> str:
    """What bounds the iteration: the part that, if 10 % faster, shortens the iteration most."""

    def seconds(name: str) -> float:
        return simulate(replace(work, **{name: 0.9 * getattr(work, name)}), machines).total_s

    return TIMES[min(TIMES, key=seconds)]


def enough_workers(work: Iteration, machines: Machines) -> int:
    """The number of workers beyond which all further ones (up to `MOST_WORKERS`) together save less
    than `WORTH_IT` of the iteration; 0 if no pool saves that."""

    def is_enough(workers: int) -> bool:
        total_s = simulate(work, replace(machines, workers=workers)).total_s
        return total_s * (1 - WORTH_IT) < least_s

    least_s = simulate(work, replace(machines, workers=MOST_WORKERS)).total_s
    if is_enough(0):
        return 0
    return 1 + bisect.bisect_left(range(1, MOST_WORKERS), True, key=is_enough)


# ---- phase times ---------------------------------------------------------------------------------
# Computes the times of an iteration's phases, from a config's FLOPs or from a finished run.

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
    sizes = memory_plan.sizes(resolved)
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


# ---- pool report ---------------------------------------------------------------------------------
# Lines of `rl check` about a pool of render workers.


def pool_lines(resolved: Resolved) -> list[str]:
    """Memory of a worker, transfer, and what the config's workers and more of them save."""
    pool = resolved.config.pool
    assert pool is not None
    workers, local = (None if pool.workers == "auto" else pool.workers), pool.local
    lines = [f"{pool.workers} workers, Ray at {pool.address}"]
    drawn_by_ranks = resolved.config.model_copy(update={"render_pool": RenderPoolConfig()})
    on_a_rank = replace(resolved, config=drawn_by_ranks)
    if planned := memory_plan.footprint(on_a_rank, resolved.config.gpu_gb):
        renderer = [row.gb for row in planned.rows if row.part.startswith(resolved.renderer.key)]
        lines.append(f"a worker takes {CONTEXT_GB + sum(renderer):.1f} GB of its GPU")
    try:
        times = computed(resolved)
    except ValueError as error:
        return [*lines, f"time not planned: {error}"]
    work, alone = times.iteration, Machines(judge_slots=times.slots_per_judge, local=local)
    gb = work.num_ranks * work.num_pictures * work.picture_bytes / 1e9
    lines.append(
        f"transfer: {gb:.2f} GB an iteration ({work.picture_bytes / 1e6:.1f} MB a picture)"
    )
    enough = enough_workers(work, alone)
    lines.append(f"an iteration, {times.source}:")
    for number in sorted({0, enough} | ({workers} if workers else set())):
        machines = replace(alone, workers=number)
        seconds = f"{simulate(work, machines).total_s:.4g} s"
        where = f"with {number} workers" if number else "without a pool"
        lines.append(f"  {seconds} {where}; {bound_by(work, machines)} bounds it")
    return [*lines, f"beyond {enough} workers, further ones together save less than {WORTH_IT:.0%}"]
