"""Collects the sizes that the memory plan needs from a config's plugins."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from rl.api.plugin import ModelRunner, PlacedConfig
from rl.build import Plugin, Resolved
from rl.memory import memory_plan
from rl.memory.memory_plan import (
    KNOWN,
    Conditioning,
    FrozenModel,
    InferenceEngine,
    Plan,
    PolicyModel,
    Sizes,
)
from rl.model_files import num_parameters

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
SHAPE = {"num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads"}
"""Keys that a model's config.json must have for its shape to be known."""
TOWERS = {"visual", "vision_model", "vision_tower"}
"""Names of the module that encodes pictures, in transformers' model classes."""
VLLM_SHARE = 0.92
"""Share of each of its GPUs that `vllm serve` takes without --gpu-memory-utilization."""


def footprint(resolved: Resolved, gpu_gb: float, folder: str = "") -> Plan | None:
    """The plan for one rank's GPU; None if the policy is on the CPU or its shape is unknown.
    `folder`: the folder of the policy's weights, once they are downloaded."""
    rank_sizes = gpu_sizes(resolved, folder)
    return None if rank_sizes is None else memory_plan.plan(rank_sizes, gpu_gb)


def host_footprint(resolved: Resolved, gpu_gb: float, num_ranks: int) -> Plan | None:
    """The plan for the host memory of a machine with `num_ranks` ranks; None as in `footprint`."""
    rank_sizes = gpu_sizes(resolved)
    if rank_sizes is None:
        return None
    on_gpu = memory_plan.plan(rank_sizes, gpu_gb)
    return memory_plan.host_plan(rank_sizes, on_gpu, gpu_gb, num_ranks)


def unknowns(resolved: Resolved) -> list[str]:
    """Models that the plan leaves out because their size is unknown, each with its key."""
    problems = []
    if _policy_model(resolved) is None:
        problems.append(
            f"policy: {policy_weights(resolved)!r} is neither a local folder of safetensors nor "
            f"one of {', '.join(KNOWN)}"
        )
    engine = resolved.engine
    if not (engine.cls.samples_with_trainer or engine.cls.memory(engine.config)):
        problems.append(f"engine: {engine.name} does not state its memory")
    for plugin in resolved.model_runners:
        on_gpu = isinstance(plugin.config, PlacedConfig) and plugin.config.device != "cpu"
        if on_gpu and not sum(plugin.cls.parameter_counts(plugin.config).values()):
            source = "".join(f" of {path!r}" for path in plugin.cls.reads_from(plugin.config)[:1])
            problems.append(f"{plugin.key}: {plugin.name} does not know the size{source}")
    if policy_device(resolved) != "cpu" and judge_share(resolved) is None:
        problems.append(
            "judge.start_command: it does not say how much of the ranks' GPUs the judge takes; add "
            "--gpu-memory-utilization, or begin it with 'env', 'CUDA_VISIBLE_DEVICES=<other GPUs>'"
        )
    return problems


def judge_share(resolved: Resolved) -> float | None:
    """Share of a rank's GPU that the judge takes that the run starts, as its command says; 0 if
    there is none, or none on the ranks' GPUs; None if the command says nothing."""
    parts = [part for part in resolved.by_judge.values() if part.needs_judge]
    shares = [_share_of(part.config.judge.start_command, resolved) for part in parts]
    return None if None in shares else sum(share or 0.0 for share in shares)


def _share_of(start_command: Sequence[str], resolved: Resolved) -> float | None:
    command = shlex.join(start_command)
    if not command:
        return 0.0
    ranks = [str(number) for number in range(resolved.config.world_size)]
    own = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(ranks)).split(",")[: len(ranks)]
    stated = re.search(r"CUDA_VISIBLE_DEVICES=([\w,-]*)", command)
    if stated and not set(stated[1].split(",")) & set(own):
        return 0.0
    share = re.search(r"gpu[-_]memory[-_]utilization[= ]([\d.]+)", command)
    is_vllm = re.search(r"\bvllm\b|serve_judge\.sh", command)
    return float(share[1]) if share else VLLM_SHARE if is_vllm else None


def policy_weights(resolved: Resolved) -> str:
    """The first path or hub id that the policy reads; without one, the plugin's name."""
    paths = resolved.policy.cls.reads_from(resolved.policy.config)
    return next(iter(paths), resolved.policy.name)


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


def gpu_sizes(resolved: Resolved, folder: str = "") -> Sizes | None:
    """Like `sizes`, but None also if the policy is on the CPU."""
    return None if policy_device(resolved) == "cpu" else sizes(resolved, folder)


def sizes(resolved: Resolved, folder: str = "") -> Sizes | None:
    """The sizes of one rank; None if the policy's shape is unknown. `folder`: as in `footprint`."""
    config, optimizer = resolved.config, resolved.config.optimizer
    policy = resolved.policy.config
    model = _policy_model(resolved, folder)
    if model is None:
        return None
    lora = policy.lora
    prompt, completion = int(policy.max_prompt_tokens), config.sampling.max_completion_tokens
    kept, limiting_key = kept_tokens(resolved)
    # A completion that is longer than the token budget is a row of its own.
    longest_row = max(optimizer.max_tokens_per_micro_batch, prompt + completion)
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
        prompt_tokens=prompt,
        completion_tokens=completion,
        num_completions=prompts * config.generations_per_prompt,
        checkpointing=optimizer.gradient_checkpointing,
        engine=_engine(resolved, model, prompt + completion),
        reads_reference=lora is None and config.algorithm.kl_coeff > 0,
        conditioning=_conditioning(resolved),
        judge_share=judge_share(resolved) or 0.0,
        frozen=[_frozen(plugin, policy_device(resolved)) for plugin in resolved.model_runners],
    )


def _conditioning(resolved: Resolved) -> Conditioning:
    policy = resolved.policy.config
    reads_states = resolved.renderer.cls.accepts == "hidden_states"
    reads_again = policy.thought is not None and policy.thought.states == "words"
    if reads_states and not reads_again and getattr(policy, "conditioning", "policy") == "policy":
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
    tower = 0 if without_tower else model.tower_params
    params = model.params - model.tower_params + tower
    return InferenceEngine(
        share=memory.share,
        cache_gb=None if memory.cache_mb is None else memory.cache_mb * 2**20 / 1e9,
        own_gb=memory.own_gb + (0 if policy.config.lora is None else memory.adapter_gb),
        weights_gb=params * num_bytes / 1e9,
        kv_bytes=model.cached_values_per_token * num_bytes,
        step_bytes=model.mlp_bytes(num_bytes)
        + (2 + model.deepstack_levels) * model.width * num_bytes,
        longest_tokens=memory.max_model_len or longest,
        max_num_seqs=memory.max_num_seqs,
        residency=memory.residency,
    )


def _frozen(plugin: Plugin[ModelRunner], policys_device: str) -> FrozenModel:
    """The plugin's model; its sizes are empty if it runs no model of its own."""
    config = plugin.config if isinstance(plugin.config, PlacedConfig) else PlacedConfig()
    # 'auto' is the rank's own GPU; for rank 0 that is cuda:0.
    policy_gpu = "cuda:0" if policys_device == "auto" else policys_device
    beside_policy = config.device in ("auto", "cuda:+0", policy_gpu)
    return FrozenModel(
        name=plugin.key,
        device="auto" if beside_policy else config.device,
        bytes_per_value=BYTES[config.dtype],
        weights=plugin.cls.parameter_counts(plugin.config),
        activations=plugin.cls.activation_counts(plugin.config),
        host_weights=plugin.cls.host_parameters(plugin.config),
        host_shared=plugin.cls.shares_host_parameters(plugin.config),
    )


def _policy_model(resolved: Resolved, folder: str = "") -> PolicyModel | None:
    """The model's sizes, by hub id or from a local folder's config.json and safetensors headers.
    Tries the policy's paths in order; None if no path has them."""
    for path in (*resolved.policy.cls.reads_from(resolved.policy.config), folder):
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
