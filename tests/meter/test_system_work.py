"""What is counted as work: single operations by hand, whole language models by both counters."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest
import tiny_qwen
import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional

from rl.api.policy import LoraSection
from rl.meter import flop_meter
from rl.meter.flop_count import FlopCount
from rl.meter.flop_meter import Ceilings, Work
from rl.meter.flops import LanguageModel, prefix_tree_pairs, sampling_work
from rl.policies.qwen2_5_vl import WindowedTower
from rl.policies.shared.recomputing import recompute

EVERY_MATRIX = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def test_every_thread_counts_into_one_sum():
    before = flop_meter.done()
    threads = [threading.Thread(target=flop_meter.add, args=[Work(3, 5)]) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert flop_meter.done() - before == Work(60, 100)


def test_a_floor_is_the_longer_of_computing_and_moving():
    ceilings = Ceilings(flops_per_s=1e12, bytes_per_s=1e9)
    assert ceilings.roofline_s(Work(2e12, 1e9)) == 2.0
    assert ceilings.roofline_s(Work(2e12, 3e9)) == 3.0


def test_measured_ceilings_are_those_of_a_computer():
    ceilings = flop_meter.measure_ceilings("cpu", "float32")
    assert 1e9 < ceilings.flops_per_s < 1e14
    assert 1e8 < ceilings.bytes_per_s < 1e13


def test_peak_memory_is_what_the_kernel_says():
    status = Path("/proc/self/status").read_text(encoding="ascii")
    peak_kib = int(re.search(r"VmHWM:\s+(\d+) kB", status)[1])
    peak_gb = flop_meter.take_peak_memory_gb("cpu")
    # Linux hands the peak of the process that started this one on, should that be the larger.
    assert 0.99 * peak_kib * 1024 / 1e9 <= peak_gb < 1000


@pytest.mark.parametrize("inference", [False, True])
def test_operations_are_counted_as_by_hand(inference):
    left, right = torch.randn(3, 5), torch.randn(5, 7)
    pixels, kernel = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)
    query, key = torch.randn(1, 2, 6, 16), torch.randn(1, 1, 10, 16)
    with torch.inference_mode(inference), torch.no_grad(), FlopCount() as count:
        _ = left @ right
        assert count.flops == 2 * 3 * 5 * 7
        functional.linear(left, right.T)
        assert count.flops == 2 * (2 * 3 * 5 * 7)
        functional.conv2d(pixels, kernel, padding=1)
        assert count.flops == 4 * 3 * 5 * 7 + 2 * (2 * 8 * 8 * 4) * (3 * 3 * 3)
        before = count.flops
        functional.scaled_dot_product_attention(query, key, key, enable_gqa=True)
        assert count.flops - before == 4 * 2 * (6 * 10) * 16
        before = count.flops
        functional.scaled_dot_product_attention(query, query, query, is_causal=True)
        assert count.flops - before == 4 * 2 * (6 * 7 / 2) * 16


def test_backwards_are_counted_too():
    query = torch.randn(1, 2, 6, 16, requires_grad=True)
    with FlopCount() as count:
        functional.scaled_dot_product_attention(
            query, query, query, is_causal=True
        ).sum().backward()
    pairs = 6 * 7 // 2
    assert count.flops == pytest.approx((4 + 10) * 2 * pairs * 16)


def test_a_forward_is_counted_once_per_size_and_remembered(monkeypatch):
    model = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.Linear(8, 4))
    num_counts = []
    start = FlopCount.__init__
    monkeypatch.setattr(FlopCount, "__init__", lambda self: num_counts.append(1) or start(self))
    flops_per_row, weights = 2 * (16 * 8 + 8 * 4), 4 * (16 * 8 + 8 + 8 * 4 + 4)
    for num_rows, counted_so_far in ((5, 1), (5, 1), (3, 2)):
        before = flop_meter.done()
        with flop_meter.counted(model, num_rows):
            model(torch.randn(num_rows, 16))
        assert flop_meter.done() - before == Work(num_rows * flops_per_row, weights)
        assert len(num_counts) == counted_so_far


def test_a_forward_that_raises_counts_nothing_and_leaves_the_next_one_whole():
    model = torch.nn.Linear(16, 8)
    before = flop_meter.done()
    with pytest.raises(RuntimeError), flop_meter.counted(model, 2):
        model(torch.randn(2, 3))
    assert flop_meter.done() == before
    with flop_meter.counted(model, 2):
        model(torch.randn(2, 16))
    assert (flop_meter.done() - before).flops == 2 * 2 * 16 * 8


class Block(torch.nn.Module):
    """Torch compiles nobody's forward but one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(16, 16)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.linear(values)


def test_counting_does_not_keep_a_model_from_being_compiled(monkeypatch):
    monkeypatch.delenv("TORCHDYNAMO_DISABLE")
    monkeypatch.setattr(torch._dynamo.config, "disable", False)  # a CPU sampler leaves it so
    compiled = []

    def backend(graph, example_inputs):
        compiled.append(graph)
        return graph.forward

    model = torch.nn.Sequential(Block())
    model[0].compile(backend=backend)
    for num_compiled in (0, 1, 1):
        before = flop_meter.done()
        with flop_meter.counted(model, 2):
            model(torch.randn(2, 16))
        assert (flop_meter.done() - before).flops == 2 * 2 * 16 * 16
        assert len(compiled) == num_compiled


def test_a_kept_forward_counts_its_backward_when_it_comes():
    weight = torch.ones(3, requires_grad=True)
    output = weight * 2
    before = flop_meter.done()
    flop_meter.add_passes(output, forward=Work(10), backward=Work(100))
    assert flop_meter.done() - before == Work(10)
    output.sum().backward()
    assert flop_meter.done() - before == Work(110)
    flop_meter.add_passes(output.detach(), forward=Work(1), backward=Work(1000))
    assert flop_meter.done() - before == Work(111)


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_qwen.make_tokenizer()


@pytest.mark.parametrize("again", [False, True, "mlp"])
@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), ("o_proj",), EVERY_MATRIX, None])
def test_the_formulas_are_what_a_real_model_executes(tokenizer, targets, again):
    model = tiny_qwen.make_model(tokenizer)
    lora = LoraSection(r=4, target_modules=targets) if targets else None
    sizes = LanguageModel.of(model.config.text_config, lora, again)
    backbone = model.model
    if lora is not None:
        names = rf".*language_model\..*\.({'|'.join(targets)})"
        get_peft_model(model, LoraConfig(r=4, target_modules=names))
    if again == "mlp":
        for layer in backbone.language_model.layers:
            recompute(layer.mlp)
    elif again:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    backbone.train()
    ids = torch.arange(24)[None] + 10
    with FlopCount() as forward:
        hidden = backbone(input_ids=ids, use_cache=False).last_hidden_state
    with FlopCount() as backward:
        hidden.sum().backward()
    pairs = prefix_tree_pairs(24, ())
    assert forward.flops == pytest.approx(sizes.forward_flops(24, pairs))
    assert backward.flops == pytest.approx(sizes.backward_flops(24, pairs))


def test_the_vision_towers_formula_is_what_a_real_one_executes(tokenizer):
    tower = tiny_qwen.make_model(tokenizer).model.visual
    grids = [(8, 8), (10, 14), (2, 18), (4, 4)]  # windows of 8 by 8 patches, whole and cut ones
    num_patches = sum(rows * columns for rows, columns in grids)
    before = flop_meter.done()
    WindowedTower().count(tower.config, grids, bytes_per_value=4)
    told = flop_meter.done() - before
    with torch.no_grad(), FlopCount() as executed:
        tower(torch.randn(num_patches, 1176), torch.tensor([(1, *grid) for grid in grids]))
    assert told.flops == executed.flops
    weights = sum(p.numel() for name, p in tower.named_parameters() if p.ndim >= 2)
    assert told.bytes_moved == 4 * weights


def test_pairs_of_a_prefix_tree_by_enumeration():
    prompt_len, completion_lens = 5, (3, 0, 2)
    pairs = sum(i + 1 for i in range(prompt_len))
    for length in completion_lens:
        pairs += sum(prompt_len + i + 1 for i in range(length))
    assert prefix_tree_pairs(prompt_len, completion_lens) == pairs


def test_sampling_by_hand():
    sizes = LanguageModel(
        num_layers=1, width=2, mlp_width=3, num_heads=1, num_kv_heads=1, head_dim=2, vocabulary=5
    )
    assert sizes.num_weights == 4 * 2 * 2 + 3 * 2 * 3 + 2 * 5 == 44
    matrices, head, per_pair = 2 * (16 + 18), 2 * 2 * 5, 4 * 2
    prompt = Work(3 * matrices + head + 6 * per_pair, 2 * 44)
    # The members are fed 1 and 3 tokens: over the prompt, and over what they wrote so far.
    pairs = (3 + 1) + (3 + 1) + (3 + 2) + (3 + 3)
    # Three steps read the weights; the prompt's keys and values once for both, their own each.
    cached = (2 * 2 * 2) * (3 * 3 + 1 + (1 + 2 + 3))
    steps = Work(4 * (matrices + head) + pairs * per_pair, 3 * 2 * 44 + cached)
    assert sampling_work(sizes, [3], [[2, 4]], bytes_per_value=2) == prompt + steps


def test_no_completion_no_steps():
    sizes = LanguageModel(1, 2, 3, 1, 1, 2, 5)
    prompt_alone = sampling_work(sizes, [3], [[]], 2)
    assert sampling_work(sizes, [3], [[0, 1]], 2) == prompt_alone
    assert prompt_alone.bytes_moved == 2 * sizes.num_weights
