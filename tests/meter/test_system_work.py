"""FLOP formulas against enumeration and torch's counter; measured speed and peak memory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tiny_qwen
import tiny_qwen3
import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional

from benchmarks.flop_counter import flop_counter
from rl.api.policy import LoraSection
from rl.meter import LanguageModel, measure_flops_per_s, prefix_tree_pairs, take_peak_memory_gb

EVERY_MATRIX = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def test_the_measured_flops_per_second_are_plausible():
    assert 1e9 < measure_flops_per_s("cpu", "float32") < 1e14


def test_peak_memory_agrees_with_the_kernel():
    status = Path("/proc/self/status").read_text(encoding="ascii")
    peak_kib = int(re.search(r"VmHWM:\s+(\d+) kB", status)[1])
    # On Linux a process inherits the peak of its parent if that is larger.
    assert 0.99 * peak_kib * 1024 / 1e9 <= take_peak_memory_gb("cpu") < 1000


def test_causal_attention_on_a_cpu_counts_only_the_lower_triangle():
    query = torch.randn(1, 2, 6, 16, requires_grad=True)
    for causal, pairs in ((False, 36), (True, 21)):
        with flop_counter() as count:
            out = functional.scaled_dot_product_attention(query, query, query, is_causal=causal)
        assert count.get_total_flops() == 4 * 2 * 16 * pairs
        with flop_counter() as count:
            out.sum().backward()
        assert count.get_total_flops() == 2.5 * 4 * 2 * 16 * pairs


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        (tiny_qwen, ("q_proj", "v_proj")),
        (tiny_qwen, ("o_proj",)),
        (tiny_qwen, ("down_proj",)),
        (tiny_qwen, EVERY_MATRIX),
        (tiny_qwen, None),
        (tiny_qwen3, None),
    ],
)
def test_the_formulas_agree_with_a_real_model(family, targets):
    """In Qwen3-VL all heads together are wider than the hidden size."""
    model = family.make_model(tiny_qwen.make_tokenizer())
    lora = LoraSection(r=4, target_modules=targets) if targets else None
    sizes = LanguageModel.of(model.config.text_config, lora)
    backbone = model.model
    if lora is not None:
        module_pattern = rf".*language_model\..*\.({'|'.join(targets)})"
        get_peft_model(model, LoraConfig(r=4, target_modules=module_pattern))
    backbone.train()
    ids = torch.arange(24)[None] + 10
    with flop_counter() as forward:
        hidden = backbone(input_ids=ids, use_cache=False).last_hidden_state
    with flop_counter() as backward:
        hidden.sum().backward()
    pairs = prefix_tree_pairs(24, ())
    assert forward.get_total_flops() == pytest.approx(sizes.forward_flops(24, pairs))
    assert backward.get_total_flops() == pytest.approx(sizes.backward_flops(24, pairs))


def test_attention_pairs_of_a_prefix_tree_agree_with_enumeration():
    prompt_len, completion_lens = 5, (3, 0, 2)
    pairs = sum(i + 1 for i in range(prompt_len))
    for length in completion_lens:
        pairs += sum(prompt_len + i + 1 for i in range(length))
    assert prefix_tree_pairs(prompt_len, completion_lens) == pairs
