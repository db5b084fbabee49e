"""How much GPU memory a run will want, from sizes alone.

What: `plan`, plain arithmetic over numbers that the config check collects; every assumption is in
the code below and in `Plan.assumptions`. What not: measuring, or reading models: fragmentation and
other programs are not in it, so leave a tenth of the GPU free. Called by `check.py`.

GB is 1e9 bytes throughout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CONTEXT_GB = 2.0
"""CUDA context, NCCL buffers and kernels' workspaces of one process."""
ENGINE_WORKSPACE_GB = 1.5
"""What vLLM keeps of its share for activations and CUDA graphs."""
LOGITS_GB = 0.8
"""A chunk of 2**26 float32 logits, its softmax and its gradient."""
PHASES = ("generate", "render", "reference", "learn")


@dataclass(frozen=True)
class LanguageModel:
    """Shape of a policy's language model."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    params: float
    """All of them, embeddings, head and vision tower included."""

    def lora_params(self, rank: int, modules: Sequence[str]) -> int:
        """Parameters of the adapters on these linear layers; names outside the language model's
        seven count nothing."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        sides = {
            "q_proj": self.hidden + q,
            "k_proj": self.hidden + kv,
            "v_proj": self.hidden + kv,
            "o_proj": q + self.hidden,
            "gate_proj": self.hidden + self.ffn,
            "up_proj": self.hidden + self.ffn,
            "down_proj": self.ffn + self.hidden,
        }
        return self.layers * rank * sum(sides.get(module, 0) for module in modules)

    def kv_bytes(self, bytes_per_value: int) -> int:
        """Key-value cache of one token."""
        return self.layers * 2 * self.kv_heads * self.head_dim * bytes_per_value

    def activation_values(self, num_tokens: int, checkpointing: bool) -> float:
        """Values kept for the backward: per layer its input alone (checkpointing, plus the one
        layer that is being recomputed) or everything that attention and the MLP need."""
        mlp = 3 * self.ffn
        layer = num_tokens * (5 * self.hidden + 2 * self.kv_heads * self.head_dim + mlp)
        if checkpointing:
            return self.layers * num_tokens * self.hidden + layer
        return self.layers * layer


_QWEN_7B = LanguageModel(28, 3584, 18944, 28, 4, 128, 8.29e9)
_EMU3 = LanguageModel(32, 4096, 14336, 32, 8, 128, 8.49e9)
KNOWN: Mapping[str, LanguageModel] = {
    "Qwen/Qwen2.5-VL-3B-Instruct": LanguageModel(36, 2048, 11008, 16, 2, 128, 3.75e9),
    "Qwen/Qwen2.5-VL-7B-Instruct": _QWEN_7B,
    "Qwen/Qwen2.5-VL-72B-Instruct": LanguageModel(80, 8192, 29568, 64, 8, 128, 73.4e9),
    "BAAI/Emu3-Gen": _EMU3,
    "BAAI/Emu3-Stage1": _EMU3,
    "mair-lab/sft-simple": _EMU3,
    "mair-lab/thinking-sft-simple": _EMU3,
}
"""Models that are usually on the hub rather than on the laptop that checks the config."""


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


@dataclass(frozen=True)
class Sizes:
    """What decides the memory of one rank."""

    model: LanguageModel
    bytes_per_weight: int
    """Of policy and, unless it differs, engine: 4 float32, 2 bfloat16."""
    lora_rank: int | None
    """None: full fine-tuning."""
    lora_modules: Sequence[str]
    zero_stage: int
    """0 for backend torch, which shards nothing."""
    world_size: int
    micro_batch_size: int
    prompt_tokens: int
    completion_tokens: int
    checkpointing: bool
    engine_share: float | None
    """Share of the GPU the engine claims while awake; None: it samples from the policy itself."""
    engine_sleeps: bool
    """Its memory is free for others while it sleeps."""
    max_num_seqs: int
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
    assumptions: Sequence[str]

    def total_gb(self, phase: str) -> float:
        """Sum of what is there in that phase."""
        return sum(row.gb for row in self.rows if phase in row.phases)

    @property
    def peak_gb(self) -> float:
        """The largest of the phases."""
        return max(self.total_gb(phase) for phase in PHASES)


def plan(sizes: Sizes, gpu_gb: float) -> Plan:
    """Memory per GPU when one rank has it to itself, sampler, renderer and learner included."""
    model, ranks, stage = sizes.model, sizes.world_size, sizes.zero_stage
    weights_gb = model.params * sizes.bytes_per_weight / 1e9
    full = sizes.lora_rank is None
    trained = model.params if full else model.lora_params(sizes.lora_rank or 0, sizes.lora_modules)
    # float32 moments, and a float32 master beside weights that are not float32 themselves.
    extra_master = full and sizes.bytes_per_weight != 4
    state_gb = trained * (12 if extra_master else 8) / 1e9 / (ranks if stage >= 1 else 1)
    gradient_gb = trained * 4 / 1e9 / (ranks if stage >= 2 else 1)
    tokens = sizes.micro_batch_size * (sizes.prompt_tokens + sizes.completion_tokens)
    activations = model.activation_values(tokens, sizes.checkpointing) * sizes.bytes_per_weight

    rows = [
        Row("CUDA context", CONTEXT_GB, PHASES),
        Row("policy weights", weights_gb / (ranks if stage == 3 else 1), PHASES),
        Row("optimiser state", state_gb + (0 if full else trained * 4 / 1e9), PHASES),
    ]
    frozen_rows, elsewhere = _frozen(sizes.frozen)
    rows += frozen_rows
    assumptions = [
        f"learner: {sizes.micro_batch_size} rows of {sizes.prompt_tokens} + "
        f"{sizes.completion_tokens} tokens at once, activations "
        + ("recomputed" if sizes.checkpointing else "kept"),
        f"{trained / 1e6:.1f} M trained parameters, float32 moments and gradients",
        *elsewhere,
    ]
    if sizes.engine_share is None:
        cache = model.kv_bytes(sizes.bytes_per_weight) * tokens / 1e9
        rows.append(Row("key-value cache", cache, ("generate",)))
    else:
        claimed = sizes.engine_share * gpu_gb
        phases = ("generate",) if sizes.engine_sleeps else PHASES
        rows.append(Row(f"engine ({sizes.engine_share:.0%} of the GPU)", claimed, phases))
        assumptions.append(_engine_fit(sizes, claimed - weights_gb - ENGINE_WORKSPACE_GB))
    if sizes.reads_reference:
        rows.append(Row("reference weights", weights_gb, ("reference",)))
    rows += [
        Row("gradients", gradient_gb, ("learn",)),
        Row("activations", activations / 1e9, ("learn",)),
        Row("logits, one chunk", LOGITS_GB, ("reference", "learn")),
    ]
    return Plan(rows, assumptions)


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


def _engine_fit(sizes: Sizes, cache_gb: float) -> str:
    per_completion = sizes.prompt_tokens + sizes.completion_tokens
    num_tokens = int(cache_gb * 1e9 / sizes.model.kv_bytes(sizes.bytes_per_weight))
    if num_tokens < per_completion:
        return (
            "the engine's share leaves no room for one completion beside its weights: raise "
            "engine.gpu_memory_utilization"
        )
    at_once = min(sizes.max_num_seqs, num_tokens // per_completion)
    return (
        f"the engine's cache holds {num_tokens} tokens, {at_once} full-length completions at once "
        "(more where prompts are shared)"
    )
