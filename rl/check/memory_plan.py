"""The memory plan of a GPU and its host, from model sizes."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rl.api.engine import EngineClaim, Residency
from rl.api.plugin import ModelRunner, PlacedConfig
from rl.build import Plugin, Resolved
from rl.meter import MATRICES, ModelShape, Recompute
from rl.model_files import num_parameters

# ---- memory plan ---------------------------------------------------------------------------------
# Computes the memory of a run on each GPU and node from sizes alone. GB is 1e9 bytes.

CONTEXT_GB = 2.0
"""CUDA context, NCCL buffers and kernel workspaces of one process."""
LOGITS_GB = 0.8
"""A chunk of 2**26 float32 logits, its softmax and its gradient."""
FREE_SHARE = 0.1
"""Share of the GPU that the plan leaves free."""
LOAD = "load"
"""All models and a checkpoint's optimizer state are loaded; the engine does not sleep yet."""
AWAKE = (LOAD, "generate")
"""The only phases in which a non-resident engine is awake."""
PHASES = (*AWAKE, "condition", "render", "reference", "learn", "step")
Conditioning = Literal["kept forward", "forward", "none"]
"""Which forward the policy runs before the reference pass: the one whose graph the backward uses;
one without a graph (states that are computed again, or the old log-probs of `max_staleness`); or
none."""
BUCKET_PARAMS = 5e8
"""Largest number of gradients that DeepSpeed reduces at once."""
SUBGROUP_PARAMS = 1e9
"""Largest number of parameters that ZeRO-3 updates at once."""
ENGINE_STEP_TOKENS = 16384
"""The most tokens in one step of vLLM on a GPU of 70 GiB or more; half as many on others."""
LARGE_GPU_GB = 70 * 2**30 / 1e9
CACHE_BLOCK = 16
"""Tokens per block of vLLM's cache on CUDA."""

PROCESS_GB = 4.0
"""Python, torch, vLLM and CUDA of one rank; assumed."""
HELD_STATE_GB = 4.0
"""If trained weights and moments take at most this (LoRA rank 32 on a 7B: 1.0), each rank keeps a
copy from the last finished iteration, and a second one while it makes the next copy; the first
rank keeps a third, for the checkpoint that is being written."""
PINNED_FACTOR = 2.0
"""vLLM copies each sleeping tensor into its own block of pinned host memory, which torch rounds up
to a power of two: at most twice the tensor's size."""
PINNED_SETTING = "pinned_max_cached_size_mb"
"""torch's setting: pinned allocations above this size are neither rounded up nor cached."""


@dataclass(frozen=True)
class PolicyModel(ModelShape):
    """Shape of a policy's language model."""

    params: float
    """All parameters: embeddings, head and vision tower included."""
    tower_params: float = 0.0
    """Parameters of the vision tower."""
    head_norms: bool = False
    """Whether queries and keys are normalised per head (Qwen3)."""
    deepstack_levels: int = 0
    """Number of first layers that also read picture features, which an engine buffers."""

    @classmethod
    def of(cls, config: Mapping[str, Any], **more: Any) -> PolicyModel:
        """From the values of a model's config.json; `more`: the fields that are not in it."""
        levels = config.get("vision_config", {}).get("deepstack_visual_indexes", ())
        sizes: dict[str, Any] = cls.sizes(config.get("text_config", config))
        return cls(**sizes, **more, deepstack_levels=len(levels))

    def lora_params(self, rank: int, modules: Sequence[str]) -> int:
        """Parameters of the adapters on these linear layers; unknown names are ignored."""
        sides = (sum(self.shape(module)) for module in modules if module in MATRICES)
        return self.num_layers * rank * sum(sides)

    def kept_bytes(
        self, adapted: Sequence[str] | None, bytes_per_value: int, checkpointing: Recompute
    ) -> int:
        """Bytes per token that a forward keeps for its backward, in all layers together.

        `adapted`: the linear layers that LoRA trains; None: full fine-tuning.
        """
        around, inside = self._layer_bytes(adapted, bytes_per_value)
        state = self.width * bytes_per_value
        per_layer = {False: around + inside, "mlp": around + state, True: state}
        return self.num_layers * per_layer[checkpointing]

    def working_bytes(
        self, adapted: Sequence[str] | None, bytes_per_value: int, checkpointing: Recompute
    ) -> int:
        """Bytes per token of one layer's backward: recomputed activations, gradients of its MLP."""
        around, inside = self._layer_bytes(adapted, bytes_per_value)
        recomputed = {False: 0, "mlp": inside, True: around + inside}
        return recomputed[checkpointing] + self.mlp_bytes(bytes_per_value)

    def mlp_bytes(self, bytes_per_value: int) -> int:
        """Bytes per token of gate, up and their product: a layer's peak during its forward."""
        return 3 * self.mlp_width * bytes_per_value

    def _layer_bytes(self, adapted: Sequence[str] | None, bytes_per_value: int) -> tuple[int, int]:
        """(around the MLP, inside it): bytes per token that a layer keeps (tests measure them).

        Kept are the inputs of both norms; attention's queries, keys, values and output, and the
        inputs of the head norms; the MLP's gate, up and activation; and the input of each trained
        layer, if it is none of these.
        """
        trains = MATRICES if adapted is None else adapted
        wide, narrow = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        around = 2 * self.width + 2 * wide + 2 * narrow
        around += wide + narrow if self.head_norms else 0
        around += self.width if {"q_proj", "k_proj", "v_proj"} & set(trains) else 0
        inside = 3 * self.mlp_width
        inside += self.width if {"gate_proj", "up_proj"} & set(trains) else 0
        inside += self.mlp_width if "down_proj" in trains else 0
        return around * bytes_per_value, inside * bytes_per_value


MODELS: Mapping[str, Any] = json.loads(Path(__file__).with_name("models.json").read_text())
"""`models`: hub id -> `like` (the tiny model whose layout it has), `folders` (the same for its
subfolders), `files` (JSON file -> keys that differ from the tiny model's); policies add `params`,
`tower_params` and `head_norms`, as in `PolicyModel`. The rest is for `rl rehearse`."""


def _known() -> Iterator[tuple[str, PolicyModel]]:
    for hub_id, named in MODELS["models"].items():
        model = MODELS["models"][named.get("same_as", hub_id)]
        if "params" in model:
            more = {key: model[key] for key in ("params", "tower_params", "head_norms")}
            yield hub_id, PolicyModel.of(model["files"]["config.json"], **more)


KNOWN: Mapping[str, PolicyModel] = dict(_known())
"""Shapes of hub models that are usually not downloaded on the machine that checks a config."""


@dataclass(frozen=True)
class InferenceEngine:
    """An engine that holds a copy of the policy's weights."""

    share: float | None
    """Share of the GPU that it claims while awake; None: `on_gpu` computes the cache's size."""
    own_gb: float
    """CUDA graphs and buffers that it keeps even asleep; assumed."""
    weights_gb: float
    kv_bytes: int
    """Bytes of one token in its cache."""
    step_bytes: int
    """Working memory of one token during a forward, bytes."""
    longest_tokens: int
    """Longest prompt + completion, tokens; the engine does not start if its cache holds fewer."""
    max_num_seqs: int
    residency: Residency
    """Whether it keeps its memory while others use the GPU; auto: if the GPU has room for both."""
    workspace_gb: float = 0.0
    """Memory besides weights and cache, which `on_gpu` computes."""
    cache_gb: float = 0.0
    """Size of the key-value cache, which `on_gpu` computes."""

    def on_gpu(self, num_completions: int, gpu_gb: float, room_gb: float) -> InferenceEngine:
        """This engine with its workspace (vLLM runs its largest step once when it starts) and its
        cache: of the stated share or, without one, for `num_completions` of full length, but no
        more than `max_num_seqs` and no more than fit in `room_gb`; at least one."""
        largest = ENGINE_STEP_TOKENS if gpu_gb >= LARGE_GPU_GB else ENGINE_STEP_TOKENS // 2
        step_tokens = min(largest, self.max_num_seqs * self.longest_tokens)
        workspace_gb = self.own_gb + step_tokens * self.step_bytes / 1e9
        if self.share is not None:
            cache_gb = self.share * gpu_gb - self.weights_gb - workspace_gb
        else:
            reserved_gb = self.cache_of_gb(0)  # vLLM's own block
            left_gb = room_gb - self.weights_gb - workspace_gb - reserved_gb
            num_fitting = int(left_gb / (self.cache_of_gb(1) - reserved_gb))
            num_held = max(1, min(num_completions, self.max_num_seqs, num_fitting))
            cache_gb = self.cache_of_gb(num_held)
        return replace(self, workspace_gb=workspace_gb, cache_gb=cache_gb)

    def cache_of_gb(self, num_completions: int) -> float:
        """Cache for that many completions of full length without shared prompts, in whole blocks;
        vLLM reserves one block."""
        num_blocks = num_completions * math.ceil(self.longest_tokens / CACHE_BLOCK) + 1
        return num_blocks * CACHE_BLOCK * self.kv_bytes / 1e9

    @property
    def claimed_gb(self) -> float:
        """The engine's memory while awake."""
        return self.weights_gb + self.workspace_gb + self.cache_gb

    @property
    def num_blocks(self) -> int:
        """Blocks of the engine's cache; 0 if there is no room for any."""
        # A computed cache is a whole number of bytes; float rounding must not lose one of them.
        return max(0, round(self.cache_gb * 1e9) // (CACHE_BLOCK * self.kv_bytes))

    @property
    def at_once(self) -> float:
        """Completions of full length that its cache holds without shared prompts: vLLM prints this
        as "Maximum concurrency", but decodes at most `max_num_seqs` at once. At 1 or below there is
        no room for one beside vLLM's own block, and the engine cannot start."""
        return self.num_blocks / math.ceil(self.longest_tokens / CACHE_BLOCK)


@dataclass(frozen=True)
class Item:
    """One item of the plan that takes memory."""

    part: str
    gb: float
    phases: Sequence[str]
    """The phases in which it takes memory."""

    def __str__(self) -> str:
        return f"{self.part} {self.gb:.1f}"


@dataclass(frozen=True)
class Sizes:
    """All sizes that determine the memory of one rank."""

    model: PolicyModel
    bytes_per_weight: int
    """Bytes per weight of the policy: 4 float32, 2 bfloat16."""
    lora_rank: int | None
    """None: full fine-tuning."""
    lora_modules: Sequence[str]
    zero_stage: int
    """0 for backend torch, which shards nothing."""
    world_size: int
    forward_tokens: int
    """Tokens of the longest packed row."""
    kept_tokens: int
    """Largest number of tokens whose forwards are kept for the backward."""
    all_kept: bool
    """Whether all forwards are kept, so that the learner runs no forward of its own."""
    longest_tokens: int
    """Longest prompt + completion."""
    num_completions: int
    """Completions of one iteration on this rank."""
    checkpointing: Recompute
    engine: InferenceEngine | None
    """None: the engine samples from the policy itself."""
    reads_reference: bool
    """Full fine-tuning with a KL term: the starting weights are copied to the GPU when needed."""
    frozen: Sequence[Item]
    """Renderer and reward models on the rank's GPU."""
    host_shared_gb: float = 0.0
    """Frozen weights in host memory that all ranks of a machine share."""
    host_copied_gb: float = 0.0
    """Frozen weights in host memory of which each rank has a copy."""
    conditioning: Conditioning = "kept forward"
    judge_share: float = 0.0
    """Share of the rank's GPU for a judge that the run starts."""

    @property
    def trained_params(self) -> float:
        """Number of trained parameters: the adapter's, or all of the policy's."""
        if self.lora_rank is None:
            return self.model.params
        return self.model.lora_params(self.lora_rank, self.lora_modules)

    @property
    def weights_gb(self) -> float:
        """The policy's weights, unsharded."""
        return self.model.params * self.bytes_per_weight / 1e9


@dataclass(frozen=True)
class Plan:
    """All items in a GPU's memory; `total_gb` sums them per phase."""

    items: Sequence[Item]
    engine: InferenceEngine | None = None
    """With the size of its cache; None: there is no engine with weights of its own."""
    together_gb: float = 0.0
    """The peak if the engine keeps its memory in all phases."""
    engine_stays: bool = True
    """Whether the engine keeps its memory in all phases."""

    def total_gb(self, phase: str) -> float:
        """Sum of the items of `phase`."""
        return sum(item.gb for item in self.items if phase in item.phases)

    @property
    def peak_gb(self) -> float:
        """The largest sum of any phase."""
        return max(map(self.total_gb, PHASES))


def residency_line(planned: Plan, gpu_gb: float) -> str:
    """A line for users: whether the engine keeps its memory, and why."""
    if planned.engine and planned.engine.residency != "auto":
        does = "sleeps" if planned.engine.residency == "sleep" else "stays resident"
        return f"the engine {does} while others run, as engine.residency says"
    what = "can stay resident" if planned.engine_stays else "has to sleep while others run"
    together = f"all models take {planned.together_gb:.1f} of {gpu_gb:g} GB"
    return f"the engine {what}: {together},\n    of which a tenth should stay free"


def engine_claim(planned: Plan, gpu_gb: float) -> EngineClaim | None:
    """The engine's memory that the plan computed; None if the config states a share, or the engine
    samples from the policy itself."""
    engine = planned.engine
    if engine is None or engine.share is not None:
        return None
    share = math.ceil(engine.claimed_gb / gpu_gb * 1e4) / 1e4
    return EngineClaim(round(engine.cache_gb * 1e9), min(1.0, share))


def engine_line(planned: Plan, gpu_gb: float) -> str:
    """A line for users: the engine's memory, and how much it decodes at once."""
    engine = planned.engine
    if engine is None:
        return "the engine samples from the policy itself"
    return (
        f"the engine takes {engine.claimed_gb:.1f} GB, {engine.claimed_gb / gpu_gb:.3f} of the "
        f"GPU: weights {engine.weights_gb:.1f}, workspace {engine.workspace_gb:.1f} (assumed),\n"
        f"    a cache of {engine.num_blocks * CACHE_BLOCK} tokens; maximum concurrency for "
        f"{engine.longest_tokens} tokens per request: {engine.at_once:.2f}x"
    )


def plan(sizes: Sizes, gpu_gb: float) -> Plan:
    """Memory of a GPU that only one rank uses, with engine, renderer and learner."""
    items = [Item("CUDA context", CONTEXT_GB, PHASES), *_state_items(sizes), *sizes.frozen]
    items += _forward_items(sizes)
    if sizes.judge_share:
        items.append(Item("judge", sizes.judge_share * gpu_gb, PHASES))
    if sizes.engine is None:
        num_tokens = sizes.num_completions * sizes.longest_tokens
        cache_gb = sizes.model.cached_values_per_token * sizes.bytes_per_weight * num_tokens / 1e9
        return Plan([*items, Item("key-value cache", cache_gb, ("generate",))])
    others, residency = Plan(items), sizes.engine.residency
    most_gb = (1 - FREE_SHARE) * gpu_gb
    beside_gb = max(map(others.total_gb, PHASES if residency == "resident" else AWAKE))
    engine = sizes.engine.on_gpu(sizes.num_completions, gpu_gb, most_gb - beside_gb)
    together_gb = others.peak_gb + engine.claimed_gb
    stays = residency == "resident" or (residency == "auto" and together_gb <= most_gb)
    items.append(Item("engine", engine.claimed_gb - engine.own_gb, PHASES if stays else AWAKE))
    items.append(Item("engine, also asleep", engine.own_gb, PHASES))
    return Plan(items, engine, together_gb, stays)


def _state_items(sizes: Sizes) -> Iterator[Item]:
    """Items of the policy's weights, optimizer state and gradients."""
    ranks, stage = sizes.world_size, sizes.zero_stage
    full, trained = sizes.lora_rank is None, sizes.trained_params
    # float32 moments, and a float32 master beside weights that are not float32 themselves.
    extra_master = full and sizes.bytes_per_weight != 4
    state_gb = trained * (12 if extra_master else 8) / 1e9 / (ranks if stage >= 1 else 1)
    gradient_gb = trained * 4 / 1e9 / (ranks if stage >= 2 else 1)
    # AdamW (`foreach`) holds one float32 value per parameter that it steps. ZeRO first copies this
    # rank's gradients into one flat tensor. Stages 1 and 2 free that tensor before AdamW begins, so
    # only one of the two exists at a time; stage 3 holds both, for one sub-group at a time.
    step_bytes = 4 * trained / (ranks if stage >= 1 else 1)
    if stage == 3:
        step_bytes = 8 * min(trained / ranks, SUBGROUP_PARAMS)
    weights_gb = sizes.weights_gb / (ranks if stage == 3 else 1)
    # While the judge grades, reference passes alternate with backwards that need no other rank: the
    # gradients of earlier groups exist during later reference passes.
    backward = ("learn", "step") if ranks > 1 and stage >= 2 else ("reference", "learn", "step")
    yield from (
        Item("policy weights", weights_gb, PHASES),
        # With LoRA, the adapter's weights, which are float32, are part of this item.
        Item("optimizer state", state_gb + (0 if full else trained * 4 / 1e9), PHASES),
        Item("gradients", gradient_gb, backward),
        Item("optimizer, workspace", step_bytes / 1e9, ("step",)),
    )
    if full and stage == 0 and sizes.bytes_per_weight != 4:  # summed in float32 after each backward
        once_gb = trained * sizes.bytes_per_weight / 1e9
        yield Item("gradients of a backward", once_gb, ("learn",))
    if stage >= 1:
        bucket_gb = min(trained, BUCKET_PARAMS) * (sizes.bytes_per_weight if full else 4) / 1e9
        yield Item("gradient bucket", bucket_gb, ("learn",))
    if sizes.reads_reference:
        yield Item("reference weights", sizes.weights_gb, ("reference",))


def _forward_items(sizes: Sizes) -> Iterator[Item]:
    """Items of the activations of the policy's forwards and backwards."""
    model, per_value = sizes.model, sizes.bytes_per_weight
    adapted = None if sizes.lora_rank is None else sizes.lora_modules
    kept_gb = model.kept_bytes(adapted, per_value, sizes.checkpointing) / 1e9
    forward_gb = model.mlp_bytes(per_value) / 1e9
    backward_gb = model.working_bytes(adapted, per_value, sizes.checkpointing) / 1e9
    kept_early = ("condition", "render") if sizes.conditioning == "kept forward" else ()
    forward = ("reference",) if sizes.conditioning == "none" else ("condition", "reference")
    yield from (
        Item("activations, kept", sizes.kept_tokens * kept_gb, (*kept_early, "reference", "learn")),
        Item("forward, workspace", sizes.forward_tokens * forward_gb, forward),
        Item("backward, workspace", sizes.forward_tokens * backward_gb, ("learn",)),
        Item("logits, one chunk", LOGITS_GB, (*forward, "learn")),
    )
    if not sizes.all_kept:
        yield Item("activations of a forward", sizes.forward_tokens * kept_gb, ("learn",))


def host_plan(sizes: Sizes, on_gpu: Plan, num_ranks: int) -> dict[str, float]:
    """Part -> GB of host memory of the node with the run's first rank and `num_ranks` ranks in all,
    while it saves; without the page cache, which the kernel can reclaim."""
    parts = {"processes": num_ranks * PROCESS_GB}
    if frozen_gb := sizes.host_shared_gb + num_ranks * sizes.host_copied_gb:
        parts["models, not on the GPU"] = frozen_gb
    if on_gpu.engine is not None and not on_gpu.engine_stays:
        asleep_gb = num_ranks * on_gpu.engine.weights_gb
        if PINNED_SETTING not in os.environ.get("PYTORCH_ALLOC_CONF", ""):
            asleep_gb *= PINNED_FACTOR
        parts["engine asleep, pinned"] = asleep_gb
    if sizes.reads_reference:
        parts["reference weights"] = num_ranks * sizes.weights_gb
    gathered_gb = sizes.trained_params * 12 / 1e9
    if gathered_gb <= HELD_STATE_GB:
        parts["last finished iteration"] = (num_ranks * 2 + 1) * gathered_gb
    else:
        parts["checkpoint: weights, moments"] = gathered_gb
    return parts


def host_problems(
    parts: Mapping[str, float] | None, num_ranks: int, available_gb: float | None
) -> list[str]:
    """Why the plan does not fit into `available_gb`; [] if it does, or a size is unknown."""
    needed_gb = sum((parts or {}).values())
    if parts is None or available_gb is None or needed_gb <= available_gb:
        return []
    listed = ", ".join(f"{part} {gb:.1f}" for part, gb in parts.items())
    remedy = "use fewer ranks, or a machine with more memory"
    if "engine asleep, pinned" in parts:
        remedy += "; if the GPU has room, engine.residency=resident pins nothing"
        if PINNED_SETTING not in os.environ.get("PYTORCH_ALLOC_CONF", ""):
            remedy += (
                f"; PYTORCH_ALLOC_CONF={PINNED_SETTING}:1 pins only as much as the engine's "
                "weights, but at every sleep anew"
            )
    return [
        f"host memory: {needed_gb:.1f} GB for {num_ranks} ranks ({listed}), but this machine or "
        f"container has {available_gb:.1f}; {remedy}"
    ]


# ---- plan of a config ----------------------------------------------------------------------------
# Collects the sizes that the memory plan needs from a config's plugins.

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
SHAPE = {"num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads"}
"""Keys that a model's config.json must have for its shape to be known."""
TOWERS = {"visual", "vision_model", "vision_tower"}
"""Names of the module that encodes pictures, in transformers' model classes."""


def plan_of(resolved: Resolved, gpu_gb: float, folder: str = "") -> Plan | None:
    """The plan for one rank's GPU; None if the policy is on the CPU or its shape is unknown.
    `folder`: the folder of the policy's weights, once they are downloaded."""
    rank_sizes = None if policy_device(resolved) == "cpu" else sizes(resolved, folder)
    return None if rank_sizes is None else plan(rank_sizes, gpu_gb)


def host_plan_of(resolved: Resolved, gpu_gb: float, num_ranks: int) -> dict[str, float] | None:
    """The plan for the host memory of a machine with `num_ranks` ranks; None as in `plan_of`."""
    on_gpu, rank_sizes = plan_of(resolved, gpu_gb), sizes(resolved)
    if on_gpu is None or rank_sizes is None:
        return None
    return host_plan(rank_sizes, on_gpu, num_ranks)


def unknowns(resolved: Resolved) -> Iterator[str]:
    """Models that the plan leaves out because their size is unknown, each with its key."""
    if _policy_model(resolved) is None:
        yield (
            f"policy: {policy_weights(resolved)!r} is neither a local folder of safetensors nor "
            f"one of {', '.join(KNOWN)}"
        )
    engine = resolved.engine
    if not (engine.cls.samples_with_trainer or engine.cls.memory(engine.config)):
        yield f"engine: {engine.name} does not state its memory"
    for plugin in resolved.model_runners:
        on_gpu = isinstance(plugin.config, PlacedConfig) and plugin.config.device != "cpu"
        cost = plugin.cls.cost(plugin.config)
        if on_gpu and not sum(cost.weights.values()) + cost.largest_part:
            yield f"{plugin.key}: {plugin.name} does not know the size of {plugin.paths[0]!r}"
    if policy_device(resolved) != "cpu" and judge_share(resolved) is None:
        yield (
            "judge.start_command: it does not say how much of the ranks' GPUs the judge takes; add "
            "--gpu-memory-utilization, or begin it with 'env', 'CUDA_VISIBLE_DEVICES=<other GPUs>'"
        )


def judge_share(resolved: Resolved) -> float | None:
    """Share of a rank's GPU for all judges that the run starts, as their commands state it; a
    command that names its GPUs counts 0; None if one states neither."""
    total = 0.0
    for part in resolved.by_judge.values():
        command = shlex.join(part.config.judge.start_command)
        if part.needs_judge and command and "CUDA_VISIBLE_DEVICES=" not in command:
            share = re.search(r"gpu[-_]memory[-_]utilization[= ]([\d.]+)", command)
            if share is None:
                return None
            total += float(share[1])
    return total


def policy_weights(resolved: Resolved) -> str:
    """The first path or hub id that the policy reads; without one, the plugin's name."""
    return resolved.policy.paths[0] or resolved.policy.name


def policy_device(resolved: Resolved) -> str:
    """The device in the policy's section."""
    return str(resolved.policy.config.device)


def group_tokens(resolved: Resolved) -> int:
    """Tokens of the longest group as one packed row, its prompt once, not split."""
    config = resolved.config
    completions = config.generations_per_prompt * config.sampling.max_completion_tokens
    return int(resolved.policy.config.max_prompt_tokens) + completions


def iteration_tokens(resolved: Resolved) -> int:
    """Tokens of all groups of one rank, each at its maximum length."""
    config = resolved.config
    return config.prompts_per_iteration // config.world_size * group_tokens(resolved)


def kept_tokens(resolved: Resolved) -> tuple[int, str]:
    """(tokens per iteration and rank whose graphs are kept, the setting that limits them or '')."""
    config, optimizer = resolved.config, resolved.config.optimizer
    lora = resolved.policy.config.lora
    if config.max_staleness:
        return 0, "max_staleness 1"
    if lora is not None and lora.dropout:
        return 0, "policy.lora.dropout"
    if _zero_stage(resolved) == 3:
        return 0, "optimizer.zero_stage 3"
    first_update = iteration_tokens(resolved) // optimizer.updates_per_iteration
    if optimizer.max_kept_tokens is not None and optimizer.max_kept_tokens < first_update:
        return optimizer.max_kept_tokens, "optimizer.max_kept_tokens"
    limiting_key = "optimizer.updates_per_iteration" if optimizer.updates_per_iteration > 1 else ""
    return first_update, limiting_key


def sizes(resolved: Resolved, folder: str = "") -> Sizes | None:
    """The sizes of one rank; None if the policy's shape is unknown. `folder`: as in `plan_of`."""
    config, optimizer = resolved.config, resolved.config.optimizer
    policy = resolved.policy.config
    model = _policy_model(resolved, folder)
    if model is None:
        return None
    lora = policy.lora
    longest = int(policy.max_prompt_tokens) + config.sampling.max_completion_tokens
    kept, limiting_key = kept_tokens(resolved)
    # A completion that is longer than the token budget is a row of its own.
    longest_row = max(optimizer.max_tokens_per_micro_batch, longest)
    prompts = config.prompts_per_iteration // config.world_size
    return Sizes(
        model=model,
        bytes_per_weight=BYTES[policy.dtype],
        lora_rank=lora.r if lora else None,
        lora_modules=lora.target_modules if lora else (),
        zero_stage=_zero_stage(resolved),
        world_size=config.world_size,
        forward_tokens=min(longest_row, iteration_tokens(resolved)),
        kept_tokens=kept,
        all_kept=not limiting_key,
        longest_tokens=longest,
        num_completions=prompts * config.generations_per_prompt,
        checkpointing=optimizer.gradient_checkpointing,
        engine=_engine(resolved, model, longest),
        reads_reference=lora is None and config.algorithm.kl_coeff > 0,
        conditioning=_conditioning(resolved),
        judge_share=judge_share(resolved) or 0.0,
        frozen=[item for each in resolved.model_runners for item in _frozen_items(resolved, each)],
        host_shared_gb=_frozen_host_gb(resolved, shared=True),
        host_copied_gb=_frozen_host_gb(resolved, shared=False),
    )


def _conditioning(resolved: Resolved) -> Conditioning:
    policy = resolved.policy.config
    reads_states = resolved.renderer.cls.accepts == "hidden_states"
    reads_plain = policy.thought is not None  # the plain prompt's states, which are computed again
    if reads_states and not reads_plain and getattr(policy, "conditioning", "policy") == "policy":
        return "kept forward"
    return "forward" if reads_states or resolved.config.max_staleness else "none"


def _zero_stage(resolved: Resolved) -> int:
    optimizer = resolved.config.optimizer
    return optimizer.zero_stage if optimizer.backend == "deepspeed" else 0


def _engine(resolved: Resolved, model: PolicyModel, longest: int) -> InferenceEngine | None:
    policy, engine = resolved.policy, resolved.engine
    memory = engine.cls.memory(engine.config)
    if memory is None:
        return None
    num_bytes = BYTES[memory.dtype or policy.config.dtype]
    # A frozen, unsharded vision tower of the policy encodes pictures for the engine, too.
    without_tower = policy.cls.has_frozen_tower(policy.config) and _zero_stage(resolved) < 3
    params = model.params - (model.tower_params if without_tower else 0)
    return InferenceEngine(
        share=memory.share,
        own_gb=memory.own_gb + (0 if policy.config.lora is None else memory.adapter_gb),
        weights_gb=params * num_bytes / 1e9,
        kv_bytes=model.cached_values_per_token * num_bytes,
        # The MLP, the hidden states, the residual, and the features of deepstack.
        step_bytes=model.mlp_bytes(num_bytes)
        + (2 + model.deepstack_levels) * model.width * num_bytes,
        longest_tokens=memory.max_model_len or longest,
        max_num_seqs=memory.max_num_seqs,
        residency=memory.residency,
    )


def _frozen_items(resolved: Resolved, plugin: Plugin[ModelRunner]) -> Iterator[Item]:
    """What the plugin's model takes of the rank's own GPU."""
    own = policy_device(resolved)
    # 'auto' and 'cuda:+0' are the rank's own GPU; rank 0's is also cuda:0.
    devices = ("auto", "cuda:+0", "cuda:0" if own == "auto" else own)
    if isinstance(plugin.config, PlacedConfig) and plugin.config.device in devices:
        cost, gb_per_value = plugin.cls.cost(plugin.config), BYTES[plugin.config.dtype] / 1e9
        for part, number in cost.weights.items():
            yield Item(f"{plugin.key} {part}", number * gb_per_value, PHASES)
        if cost.largest_part:
            yield Item(f"{plugin.key}, largest part", cost.largest_part * gb_per_value, ("render",))
        if cost.activations:  # its parts run one after the other
            working_gb = max(cost.activations.values()) * gb_per_value
            yield Item(f"{plugin.key}, workspace", working_gb, ("render",))


def _frozen_host_gb(resolved: Resolved, shared: bool) -> float:
    """Frozen weights in host memory, GB: those that all ranks of a machine share, or those of which
    each has a copy."""
    costs = [(p.cls.cost(p.config), p.config) for p in resolved.model_runners]
    return sum(
        cost.host_weights * BYTES[config.dtype] / 1e9
        for cost, config in costs
        if isinstance(config, PlacedConfig) and cost.host_shared == shared
    )


def _policy_model(resolved: Resolved, folder: str = "") -> PolicyModel | None:
    """The model's sizes, by hub id or from a local folder's config.json and safetensors headers.
    Tries the policy's paths in order; None if no path has them."""
    for path in (*resolved.policy.paths, folder):
        file = Path(path) / "config.json"
        if not path or not file.is_file():
            if path in KNOWN:
                return KNOWN[path]
            continue
        values = json.loads(file.read_text(encoding="utf-8"))
        params = num_parameters(path)
        if params and values.get("text_config", values).keys() >= SHAPE:
            tower = num_parameters(path, lambda name: not TOWERS.isdisjoint(name.split(".")))
            norms = num_parameters(path, lambda name: name.endswith("q_norm.weight"))
            more = {"params": params, "tower_params": tower, "head_norms": norms > 0}
            return PolicyModel.of(values, **more)
    return None
