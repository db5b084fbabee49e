"""The memory plan of an engine against vLLM's start-up arithmetic, and the arguments vLLM gets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import tiny_config
import torch
from vllm.config import CacheConfig, VllmConfig
from vllm.engine import arg_utils
from vllm.usage.usage_lib import UsageContext
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import FullAttentionSpec

from rl import build
from rl.api.engine import EngineClaim, EngineSetup
from rl.check import memory_plan
from rl.check.memory_plan import PolicyModel
from rl.engines import vllm as vllm_engine


def vllm_starts(model: PolicyModel, longest_tokens: int, cache_bytes: int) -> tuple[int, float]:
    """(blocks, "Maximum concurrency for N tokens per request") of a bfloat16 cache of that size, or
    vLLM's ValueError."""
    config = VllmConfig()
    config.model_config = SimpleNamespace(
        max_model_len=longest_tokens, original_max_model_len=longest_tokens
    )
    config.cache_config = CacheConfig(block_size=memory_plan.CACHE_BLOCK)
    config.cache_config.kv_cache_layout = "NHD"
    spec = FullAttentionSpec(
        block_size=memory_plan.CACHE_BLOCK,
        num_kv_heads=model.num_kv_heads,
        head_size=model.head_dim,
        dtype=torch.bfloat16,
    )
    layers = {f"layers.{index}.attn": spec for index in range(model.num_layers)}
    [cache] = kv_cache_utils.get_kv_cache_configs(config, [layers], [cache_bytes])
    return cache.num_blocks, kv_cache_utils.get_max_concurrency_for_kv_cache_config(config, cache)


@pytest.mark.parametrize("gpu_gb", [80, 141])
@pytest.mark.parametrize(
    "name",
    ["qwen_image_edit", "sft_s__rl_sc", "vlm_reasoning", "prompt_enhancement", "one_gpu_80gb"],
)
def test_the_plan_equals_vllms_own_arithmetic(name: str, gpu_gb: int) -> None:
    config = tiny_config.evaluated(name)
    if config.gpu_gb != gpu_gb:
        config = tiny_config.evaluated(name, f"gpu_gb={gpu_gb}")
    sizes = memory_plan.sizes(build.resolve(config))
    assert sizes is not None
    planned = memory_plan.plan(sizes, gpu_gb)
    engine, claim = planned.engine, memory_plan.engine_claim(planned, gpu_gb)
    assert engine is not None and claim is not None
    num_blocks, at_once = vllm_starts(sizes.model, engine.longest_tokens, claim.cache_bytes)
    assert num_blocks == engine.num_blocks
    assert at_once == engine.at_once >= config.generations_per_prompt
    # The smallest cache with which vLLM starts, to the byte.
    least = round(engine.cache_of_gb(1) * 1e9)
    assert vllm_starts(sizes.model, engine.longest_tokens, least)[1] >= 1
    with pytest.raises(ValueError, match="larger than the available KV cache memory"):
        vllm_starts(sizes.model, engine.longest_tokens, least - 1)


@pytest.mark.parametrize(
    ("gib", "name"),
    [(79.1, "NVIDIA H100 80GB HBM3"), (139.8, "NVIDIA H200"), (44.4, "NVIDIA L40S")],
)
def test_the_plan_knows_vllms_largest_step(
    monkeypatch: pytest.MonkeyPatch, gib: float, name: str
) -> None:
    platform = SimpleNamespace(
        get_device_total_memory=lambda: int(gib * 2**30),
        get_device_name=lambda: name,
        is_tpu=lambda: False,
        is_cpu=lambda: False,
    )
    monkeypatch.setattr(arg_utils, "current_platform", platform)
    most, _ = arg_utils.EngineArgs.get_batch_defaults(world_size=1)
    large = gib * 2**30 / 1e9 >= memory_plan.LARGE_GPU_GB
    tokens = memory_plan.ENGINE_STEP_TOKENS
    assert most[UsageContext.LLM_CLASS] == (tokens if large else tokens // 2)


@pytest.mark.parametrize(
    ("section", "device", "claim", "expected"),
    [
        ({}, "cpu", None, {"kv_cache_memory_bytes": 256 << 20, "gpu_memory_utilization": 0.01}),
        (
            {},
            "cuda:0",
            EngineClaim(5_000_000, 0.27),
            {"kv_cache_memory_bytes": 5_000_000, "gpu_memory_utilization": 0.27},
        ),
        (
            {"gpu_memory_utilization": 0.3},
            "cuda:0",
            None,
            {"kv_cache_memory_bytes": None, "gpu_memory_utilization": 0.3},
        ),
    ],
)
def test_vllm_gets_the_planned_or_stated_memory(
    section: dict[str, Any], device: str, claim: EngineClaim | None, expected: dict[str, Any]
) -> None:
    assert arguments(section, device, claim) == expected


def test_an_automatic_share_needs_a_plan() -> None:
    with pytest.raises(ValueError, match=r"engine\.gpu_memory_utilization: 'auto'.*give a share"):
        arguments({}, "cuda:0", None)


def arguments(section: dict[str, Any], device: str, claim: EngineClaim | None) -> dict[str, Any]:
    """The arguments of an engine that is not started, because that takes a GPU."""
    engine = object.__new__(vllm_engine.VllmEngine)
    engine.config = vllm_engine.Config.model_validate({"type": "vllm", **section})
    engine._setup = EngineSetup(None, device, claim=claim)  # type: ignore[arg-type]
    engine._on_cuda = device.startswith("cuda")
    return engine._memory_arguments()
