"""How much GPU memory a run will want, from sizes alone.

Fragmentation and other programs are not in it, so a tenth of the GPU is left free.
GB is 1e9 bytes throughout. A data-centre GPU has more of them than its name says: about 85 are an
"H100 80GB", 150 an "H200 141GB". A plan by the name is on the safe side: what fits beside a share
of the smaller number fits beside the same share of the larger one. A start plans for the bytes that
it finds.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from rl.api.engine import EngineClaim
from rl.meter.flops import Recompute
from rl.preflight.engine_memory import CACHE_BLOCK, InferenceEngine
from rl.preflight.policy_model import PolicyModel

CONTEXT_GB = 2.0
"""CUDA context, NCCL buffers and kernels' workspaces of one process."""
LOGITS_GB = 0.8
"""A chunk of 2**26 float32 logits, its softmax and its gradient."""
FREE_SHARE = 0.1
"""Of the GPU, left to what no plan knows."""
AWAKE = "generate"
"""The phase in which an engine that sleeps is awake."""
PHASES = (AWAKE, "render", "reference", "learn", "step")
TRAINER = ("render", "reference", "learn")
"""The policy's forwards begin with the first picture's."""
BUCKET_PARAMS = 5e8
"""Gradients that DeepSpeed reduces at once, at most."""
SUBGROUP_PARAMS = 1e9
"""Parameters that ZeRO-3 steps at once, at most."""


@dataclass(frozen=True)
class FrozenModel:
    """A model that is only read: the renderer, a reward's own."""

    name: str
    device: str
    """'auto': the rank's own GPU, the one planned for."""
    bytes_per_value: int
    weights: Mapping[str, float]
    """Part -> parameters."""
    activations: Mapping[str, float]
    """Part -> values alive at the peak of one forward."""
    host_weights: float = 0.0
    """Parameters that stay in host memory."""
    host_shared: bool = True
    """As pages of a file, once for all ranks of a machine."""

    @property
    def weights_gb(self) -> float:
        """All parts' together."""
        return sum(self.weights.values()) * self.bytes_per_value / 1e9

    def host_gb(self, num_ranks: int) -> float:
        """Host memory of that many ranks of one machine."""
        copies = 1 if self.host_shared else num_ranks
        return copies * self.host_weights * self.bytes_per_value / 1e9


@dataclass(frozen=True)
class Sizes:
    """What decides the memory of one rank."""

    model: PolicyModel
    bytes_per_weight: int
    """Of the policy: 4 float32, 2 bfloat16."""
    lora_rank: int | None
    """None: full fine-tuning."""
    lora_modules: Sequence[str]
    zero_stage: int
    """0 for backend torch, which shards nothing."""
    world_size: int
    forward_tokens: int
    """Of the longest packed row."""
    kept_tokens: int
    """Whose forwards are kept for the backward, at most."""
    all_kept: bool
    """So that the learner runs no forward of its own."""
    prompt_tokens: int
    completion_tokens: int
    num_completions: int
    """Of one iteration on this rank."""
    checkpointing: Recompute
    engine: InferenceEngine | None
    """None: the engine samples from the policy itself."""
    reads_reference: bool
    """Full fine-tuning with a KL term: the starting weights come to the GPU to be read."""
    frozen: Sequence[FrozenModel]
    """Renderer and reward models."""


@dataclass(frozen=True)
class Row:
    """One occupant of the GPU."""

    part: str
    gb: float
    phases: Sequence[str]
    """When it is there."""


@dataclass(frozen=True)
class Plan:
    """All occupants of one GPU, and the sum per phase."""

    rows: Sequence[Row]
    """With the engine as it will be: there all the time, or while it samples."""
    assumptions: Sequence[str]
    engine: Row | None = None
    """Whose of the rows is what an engine frees that sleeps; None: it has none."""
    inference: InferenceEngine | None = None
    """The engine of that row, its cache settled."""
    elsewhere: Mapping[str, float] = field(default_factory=dict)
    """Other device -> GB of the models that lie there, at work."""

    def total_gb(self, phase: str) -> float:
        """Sum of what is there in that phase."""
        return sum(row.gb for row in self.rows if phase in row.phases)

    @property
    def peak_gb(self) -> float:
        """The largest of the phases."""
        return max(self.total_gb(phase) for phase in PHASES)

    def with_engine(self, phases: Sequence[str]) -> Plan:
        """As it would be if the engine's memory were taken in those phases."""
        if self.engine is None:
            return self
        engine = replace(self.engine, phases=phases)
        rows = [engine if row is self.engine else row for row in self.rows]
        return replace(self, rows=rows, engine=engine)


def residency(planned: Plan, gpu_gb: float) -> Literal["resident", "sleep"]:
    """Whether the engine may keep its memory while the others work: waking it costs seconds."""
    fits = planned.with_engine(PHASES).peak_gb <= (1 - FREE_SHARE) * gpu_gb
    return "resident" if fits else "sleep"


def residency_line(planned: Plan, gpu_gb: float) -> str:
    """What `residency` finds, and why, in one line."""
    everything = f"everything at once is {planned.with_engine(PHASES).peak_gb:.1f} GB of {gpu_gb:g}"
    if residency(planned, gpu_gb) == "resident":
        return f"the engine may stay while others work: {everything}"
    return f"the engine has to sleep while others work: {everything}, and a tenth should stay free"


def engine_claim(planned: Plan, gpu_gb: float) -> EngineClaim | None:
    """What the engine is given where its section states no share, else None."""
    engine = planned.inference
    if engine is None or engine.share is not None or engine.cache_gb is None:
        return None
    share = math.ceil(engine.claimed_gb(gpu_gb) / gpu_gb * 1e4) / 1e4
    return EngineClaim(round(engine.cache_gb * 1e9), min(1.0, share))


def engine_line(planned: Plan, gpu_gb: float) -> str:
    """What the engine takes, and how much it decodes at once, in one line."""
    engine = planned.inference
    if engine is None:
        return "the engine samples from the policy itself"
    claimed_gb = engine.claimed_gb(gpu_gb)
    return (
        f"the engine takes {claimed_gb:.1f} GB, {claimed_gb / gpu_gb:.3f} of the GPU: weights "
        f"{engine.weights_gb:.1f}, workspace {engine.workspace_gb(gpu_gb):.1f} (assumed), a cache "
        f"of {engine.num_blocks(gpu_gb) * CACHE_BLOCK} tokens; maximum concurrency for "
        f"{engine.longest_tokens} tokens per request: {engine.at_once(gpu_gb):.2f}x"
    )


def plan(sizes: Sizes, gpu_gb: float) -> Plan:
    """Memory per GPU when one rank has it to itself, engine, renderer and learner included."""
    weights_gb = sizes.model.params * sizes.bytes_per_weight / 1e9
    frozen_rows, elsewhere = _frozen(sizes.frozen)
    assumptions = [
        f"one forward: up to {sizes.forward_tokens} tokens; kept until the rewards are there: "
        f"{sizes.kept_tokens}",
        f"{trained_params(sizes) / 1e6:.1f} M trained parameters, float32 moments and gradients",
        *elsewhere,
    ]
    rows = [
        Row("CUDA context", CONTEXT_GB, PHASES),
        *_state_rows(sizes, weights_gb),
        *frozen_rows,
        *_forward_rows(sizes),
    ]
    row, engine = None, sizes.engine
    if engine is None:
        num_tokens = sizes.num_completions * (sizes.prompt_tokens + sizes.completion_tokens)
        cache_gb = sizes.model.kv_bytes(sizes.bytes_per_weight) * num_tokens / 1e9
        rows.append(Row("key-value cache", cache_gb, ("generate",)))
    else:
        others = Plan(rows, ())
        beside_gb = others.peak_gb if engine.residency == "resident" else others.total_gb(AWAKE)
        room_gb = (1 - FREE_SHARE) * gpu_gb - beside_gb
        engine = engine.with_cache(sizes.num_completions, gpu_gb, room_gb)
        row = Row("engine", engine.claimed_gb(gpu_gb) - engine.own_gb, (AWAKE,))
        rows += [row, Row("engine's own, asleep too", engine.own_gb, PHASES)]
    planned = Plan(rows, assumptions, row, engine, _per_device(sizes.frozen))
    chosen = "auto" if engine is None else engine.residency
    if chosen == "auto":
        chosen = residency(planned, gpu_gb)
    return planned.with_engine(PHASES) if chosen == "resident" else planned


def trained_params(sizes: Sizes) -> float:
    """The adapter's, or all of the policy's."""
    if sizes.lora_rank is None:
        return sizes.model.params
    return sizes.model.lora_params(sizes.lora_rank, sizes.lora_modules)


def _state_rows(sizes: Sizes, weights_gb: float) -> list[Row]:
    """Weights, what the optimiser holds beside them, gradients."""
    ranks, stage = sizes.world_size, sizes.zero_stage
    full, trained = sizes.lora_rank is None, trained_params(sizes)
    # float32 moments, and a float32 master beside weights that are not float32 themselves.
    extra_master = full and sizes.bytes_per_weight != 4
    state_gb = trained * (12 if extra_master else 8) / 1e9 / (ranks if stage >= 1 else 1)
    gradient_gb = trained * 4 / 1e9 / (ranks if stage >= 2 else 1)
    rows = [
        Row("policy weights", weights_gb / (ranks if stage == 3 else 1), PHASES),
        Row("optimiser state", state_gb + (0 if full else trained * 4 / 1e9), PHASES),
        # Where no rank waits for another, backwards run while the judge still reads.
        Row(
            "gradients",
            gradient_gb,
            ("learn", "step") if ranks > 1 and stage >= 2 else (*TRAINER, "step"),
        ),
        Row("the step, working", _step_bytes(trained, ranks, stage) / 1e9, ("step",)),
    ]
    if stage >= 1:
        bucket_gb = min(trained, BUCKET_PARAMS) * (4 if not full else sizes.bytes_per_weight) / 1e9
        rows.append(Row("gradient bucket", bucket_gb, ("learn",)))
    if sizes.reads_reference:
        rows.append(Row("reference weights", weights_gb, ("reference",)))
    return rows


def _step_bytes(trained: float, ranks: int, stage: int) -> float:
    """What an optimiser step wants beside weights, state and gradients.

    AdamW (`foreach`) holds one float32 value per parameter that it steps. ZeRO copies this rank's
    gradients into one flat tensor first; under stage 1 and 2 they go before AdamW begins, so that
    it is the one or the other, under stage 3 both for one sub-group at a time.
    """
    if stage == 3:
        return 8 * min(trained / ranks, SUBGROUP_PARAMS)
    return 4 * trained / (ranks if stage >= 1 else 1)


def _forward_rows(sizes: Sizes) -> list[Row]:
    """What the policy's forwards and backwards want besides."""
    model, per_value = sizes.model, sizes.bytes_per_weight
    adapted = None if sizes.lora_rank is None else sizes.lora_modules
    kept_gb = model.kept_bytes(adapted, per_value, sizes.checkpointing) / 1e9
    forward_gb = model.mlp_bytes(per_value) / 1e9
    backward_gb = model.working_bytes(adapted, per_value, sizes.checkpointing) / 1e9
    rows = [
        Row("activations, kept", sizes.kept_tokens * kept_gb, TRAINER),
        Row("a forward, working", sizes.forward_tokens * forward_gb, ("render", "reference")),
        Row("a backward, working", sizes.forward_tokens * backward_gb, ("learn",)),
        Row("logits, one chunk", LOGITS_GB, TRAINER),
    ]
    if not sizes.all_kept:
        rows.append(Row("activations, one forward", sizes.forward_tokens * kept_gb, ("learn",)))
    return rows


def _frozen(models: Sequence[FrozenModel]) -> tuple[list[Row], list[str]]:
    """Rows of those on the planned GPU, a line for each that lies elsewhere."""
    rows, elsewhere = [], []
    for model in models:
        weights, working = (
            {part: count * model.bytes_per_value / 1e9 for part, count in counts.items()}
            for counts in (model.weights, model.activations)
        )
        if model.device != "auto":
            elsewhere.append(
                f"{model.name} lies on {model.device}: {sum(weights.values()):.2f} GB of weights "
                f"there, {sum(working.values()):.2f} while it works"
            )
            continue
        rows += [Row(f"{model.name} {part}", gb, PHASES) for part, gb in weights.items()]
        rows += [
            Row(f"{model.name} {part}, working", gb, ("render",)) for part, gb in working.items()
        ]
    return rows, elsewhere


def _per_device(models: Sequence[FrozenModel]) -> dict[str, float]:
    """GB at work on each device but the planned one."""
    devices: dict[str, float] = defaultdict(float)
    for model in models:
        if model.device != "auto":
            working = sum(model.activations.values()) * model.bytes_per_value / 1e9
            devices[model.device] += model.weights_gb + working
    return dict(devices)
