"""What a config's models want of one GPU: the memory plan's sizes, read off the chosen plugs.

What: `footprint`, and the token counts behind it. What not: the arithmetic (`memory_plan.py`) or
loading anything: shapes come from a table or from a folder's headers. Keys that only some plugs
have are read where they are there. Called by `check.py` and `opening.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl.build import Plug, Resolved
from rl.system import memory_plan
from rl.system.memory_plan import FrozenModel, LanguageModel, Plan, Sizes
from rl.system.weight_files import num_parameters

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def footprint(resolved: Resolved, gpu_gb: float) -> Plan | None:
    """The plan for one rank's GPU; None where the policy's shape is not known."""
    sizes = _sizes(resolved)
    return None if sizes is None else memory_plan.plan(sizes, gpu_gb)


def origin(config: Any) -> str:
    """The model or data a plug reads, where its section names one."""
    names = ("init_text_encoder_from", "model_path", "path")
    return next((value for name in names if (value := getattr(config, name, ""))), "")


def group_tokens(resolved: Resolved) -> int:
    """The longest group as a packed row, its prompt once, cut nowhere."""
    config = resolved.config
    completions = config.generations_per_prompt * config.sampling.max_completion_tokens
    return _prompt_tokens(resolved) + completions


def kept_tokens(resolved: Resolved) -> tuple[int, str]:
    """(tokens of one iteration and rank whose forwards are kept, why it is not all of them)."""
    config, optimizer = resolved.config, resolved.config.optimizer
    lora = getattr(resolved.policy.config, "lora", None)
    if config.max_staleness:
        return 0, "max_staleness 1"
    if lora is not None and lora.dropout:
        return 0, "policy.lora.dropout"
    if optimizer.backend == "deepspeed" and optimizer.zero_stage == 3:
        return 0, "optimizer.zero_stage 3"
    all_of_them = iteration_tokens(resolved)
    first_update = all_of_them // optimizer.updates_per_iteration
    if optimizer.max_kept_tokens is not None and optimizer.max_kept_tokens < first_update:
        return optimizer.max_kept_tokens, "optimizer.max_kept_tokens"
    why = "optimizer.updates_per_iteration" if optimizer.updates_per_iteration > 1 else ""
    return first_update, why


def iteration_tokens(resolved: Resolved) -> int:
    """Of one rank's groups, each as long as it can be."""
    config = resolved.config
    return config.prompts_per_iteration // config.world_size * group_tokens(resolved)


def _prompt_tokens(resolved: Resolved) -> int:
    return int(getattr(resolved.policy.config, "max_prompt_tokens", 2048))


def _sizes(resolved: Resolved) -> Sizes | None:
    config, optimizer = resolved.config, resolved.config.optimizer
    policy, engine = resolved.policy.config, resolved.engine.config
    model = _language_model(origin(policy)) or _language_model(getattr(policy, "model_path", ""))
    if model is None:
        return None
    lora = getattr(policy, "lora", None)
    prompt, completion = _prompt_tokens(resolved), config.sampling.max_completion_tokens
    kept, not_all = kept_tokens(resolved)
    # A completion that is longer than the budget is a row of its own.
    longest_row = max(optimizer.max_tokens_per_micro_batch, prompt + completion)
    return Sizes(
        model=model,
        bytes_per_weight=BYTES[getattr(policy, "dtype", "bfloat16")],
        lora_rank=lora.r if lora else None,
        lora_modules=lora.target_modules if lora else (),
        zero_stage=optimizer.zero_stage if optimizer.backend == "deepspeed" else 0,
        world_size=config.world_size,
        forward_tokens=min(longest_row, iteration_tokens(resolved)),
        kept_tokens=kept,
        all_kept=not not_all,
        prompt_tokens=prompt,
        completion_tokens=completion,
        num_completions=config.prompts_per_iteration
        // config.world_size
        * config.generations_per_prompt,
        checkpointing=optimizer.gradient_checkpointing,
        engine_share=getattr(engine, "gpu_memory_utilization", None),
        engine_residency=getattr(engine, "residency", "auto"),
        max_num_seqs=getattr(engine, "max_num_seqs", 1),
        reads_reference=lora is None and config.algorithm.kl_coeff > 0,
        frozen=[
            _frozen(plug, getattr(policy, "device", "auto"))
            for plug in (resolved.renderer, *resolved.rewards.values())
        ],
    )


def _frozen(plug: Plug, own_device: str) -> FrozenModel:
    """A plug that runs a model of its own says how large it is; one that runs none says nothing."""
    counts: list[Mapping[str, float]] = [
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
