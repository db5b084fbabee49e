"""The memory plan against figures worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rl.system.memory_plan import (
    CONTEXT_GB,
    KNOWN,
    LOGITS_GB,
    FrozenModel,
    LanguageModel,
    Plan,
    Sizes,
    plan,
)

MODEL = LanguageModel(layers=2, hidden=10, ffn=40, heads=5, kv_heads=1, head_dim=2, params=3e9)
EDITOR = FrozenModel("renderer", "auto", 2, {"transformer": 20e9}, {"transformer": 1e9})
SIZES = Sizes(
    model=MODEL,
    bytes_per_weight=2,
    lora_rank=4,
    lora_modules=("q_proj", "v_proj"),
    zero_stage=0,
    world_size=4,
    micro_batch_size=3,
    prompt_tokens=70,
    completion_tokens=30,
    checkpointing=False,
    engine_share=0.5,
    engine_sleeps=True,
    max_num_seqs=8,
    reads_reference=False,
    frozen=(EDITOR,),
)


def gb(planned: Plan, part: str) -> float:
    return next(row.gb for row in planned.rows if row.part == part)


def test_lora_parameters() -> None:
    # q: 10 -> 10, v: 10 -> 2, rank 4: 4 (10 + 10) + 4 (10 + 2) = 128 a layer, 2 layers.
    assert MODEL.lora_params(4, ("q_proj", "v_proj")) == 256
    # The 7B, rank 32 on q, k, v, o: 28 layers x 32 x (7168 + 4096 + 4096 + 7168).
    seven = KNOWN["Qwen/Qwen2.5-VL-7B-Instruct"]
    assert seven.lora_params(32, ("q_proj", "k_proj", "v_proj", "o_proj")) == 20_185_088


def test_activations() -> None:
    # A layer keeps 5 x 10 + 2 x 2 + 3 x 40 = 174 values a token; 2 layers, 7 tokens.
    assert MODEL.activation_values(7, checkpointing=False) == 2 * 7 * 174
    # Checkpointed: 2 layer inputs of 10 a token, and the one layer in work.
    assert MODEL.activation_values(7, checkpointing=True) == 2 * 7 * 10 + 7 * 174


def test_phases() -> None:
    planned = plan(SIZES, gpu_gb=100)
    lora = 256
    resident = CONTEXT_GB + 3 * 2 + lora * 12e-9 + 20 * 2
    assert planned.total_gb("generate") == pytest.approx(resident + 50)
    assert planned.total_gb("render") == pytest.approx(resident + 2)
    activations = 3 * 100 * 2 * 174 * 2e-9
    assert planned.total_gb("learn") == pytest.approx(
        resident + lora * 4e-9 + activations + LOGITS_GB
    )
    assert planned.peak_gb == planned.total_gb("generate")
    awake = plan(replace(SIZES, engine_sleeps=False), gpu_gb=100)
    assert awake.total_gb("learn") == pytest.approx(planned.total_gb("learn") + 50)


def test_zero_stages_under_full_fine_tuning() -> None:
    full = replace(SIZES, lora_rank=None)
    by_stage = [plan(replace(full, zero_stage=stage), gpu_gb=100) for stage in range(4)]
    # 3e9 parameters: bfloat16 weights 6 GB; masters and moments 36 GB; float32 gradients 12 GB.
    assert [gb(p, "policy weights") for p in by_stage] == pytest.approx([6, 6, 6, 1.5])
    assert [gb(p, "optimiser state") for p in by_stage] == pytest.approx([36, 9, 9, 9])
    assert [gb(p, "gradients") for p in by_stage] == pytest.approx([12, 12, 3, 3])
    reference = plan(replace(full, reads_reference=True), gpu_gb=100)
    # Beside the trained weights, and gone before the first backward.
    assert reference.total_gb("learn") == by_stage[0].total_gb("learn")
    assert reference.total_gb("reference") == pytest.approx(by_stage[0].total_gb("reference") + 6)


def test_models_on_other_devices_are_named_but_not_counted() -> None:
    clip = FrozenModel("rewards.clip", "cuda:2", 4, {"model": 0.15e9}, {})
    planned = plan(replace(SIZES, frozen=(replace(EDITOR, device="cuda:1"), clip)), gpu_gb=100)
    assert planned.total_gb("render") == pytest.approx(plan(SIZES, 100).total_gb("render") - 42)
    assert "renderer lies on cuda:1: 40.00 GB of weights there, 2.00 while it works" in (
        planned.assumptions
    )
    assert any(
        text.startswith("rewards.clip lies on cuda:2: 0.60 GB") for text in planned.assumptions
    )


def test_the_engine_cache() -> None:
    # A token takes 2 layers x 2 x 2 values x 2 bytes = 16 B. Share 8.5 GB - 6 - 1.5 = 1 GB.
    planned = plan(replace(SIZES, max_num_seqs=10**9), gpu_gb=17)
    assert any("holds 62500000 tokens, 625000 full-length" in text for text in planned.assumptions)
    small = plan(SIZES, gpu_gb=14)
    assert any("leaves no room for one completion" in text for text in small.assumptions)
    shared = plan(replace(SIZES, engine_share=None), gpu_gb=17)
    assert gb(shared, "key-value cache") == pytest.approx(300 * 16e-9)
