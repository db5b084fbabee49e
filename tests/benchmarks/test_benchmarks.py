"""The benchmark's arithmetic, and that both sides of its comparison do the same work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import experiments, picture_flops, report, toy, trl_tunings, trl_worker
from benchmarks.experiments import OURS, PREFIXES, STOCK
from benchmarks.meter import Meter
from benchmarks.toy import Shape
from rl.meter import LanguageModel
from rl.renderers.qwen_image_edit import QwenImageEdit


class Clock:
    """A fake clock that `work` advances."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def work(self, seconds: float) -> None:
        self.now_s += seconds


def test_spans_are_exclusive_and_add_up() -> None:
    clock = Clock()
    meter = Meter(cpu_clock=clock, flops_so_far=lambda: 10 * clock.now_s)
    clock.work(1)
    with meter.span("outer"):
        clock.work(2)
        with meter.span("inner"):
            clock.work(4)
        clock.work(8)
    spent = meter.read()
    assert {label: s.cpu_s for label, s in spent.items()} == {"other": 1, "outer": 10, "inner": 4}
    assert spent["inner"].flops == 40
    meter.reset()
    clock.work(16)
    assert meter.read()["other"].cpu_s == 16


def side(policy_s: list[float], gflop: float) -> dict[str, Any]:
    return {
        "cpu_s": {"policy side": policy_s, "DiT": [1.0, 1.0, 1.0]},
        "wall_s": {"policy side": policy_s},
        "gflop": {"policy side": gflop},
        "positions": 3,
    }


def test_ratios_are_medians_of_the_ratios_of_each_round() -> None:
    ours, peer = side([1.0, 2.0, 1.0], 4.0), side([8.0, 10.0, 9.0], 30.0)
    parts = ["policy side"]
    assert report.ratio(report.seconds(peer, parts), report.seconds(ours, parts)) == (8.0, 5.0, 9.0)
    assert report.seconds(peer) == [9.0, 11.0, 10.0]
    nearer = side([4.0, 4.0, 4.0], 6.0)
    record = {"over_minimum": 1.02, "sides": {STOCK: peer, PREFIXES: nearer, OURS: ours}}
    table = report.head_to_head(record)
    over = "8.0x (5.0 to 9.0) / 7.50x | 4.0x (2.0 to 4.0) / 1.50x | 1.0x (1.0 to 1.0) / 1.00x"
    assert f"| policy side over this project's | {over} |" in table
    assert "| policy side | 9.00 / 30.0 | 4.00 / 6.0 | 1.00 / 4.0 |" in table
    assert report.lead(record) == (
        f"{PREFIXES} takes 1.5x this project's FLOPs on the policy side and 4.0x (2.0 to 4.0) its "
        "CPU seconds; in a whole iteration, with sampling and rendering, 1.50x its FLOPs and "
        "2.50x (1.67 to 2.50) its CPU seconds. This project executes 4.00 GFLOP there, 1.020 times "
        "the minimum."
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("counted", "pflop"),
    [
        (lambda: picture_flops.edit(1024, 1024**2 // 28**2, 50), 20.3),
        (lambda: picture_flops.image_21(1024, 1, 40), 3.05),
    ],
)
def test_the_operations_of_a_picture_are_those_of_the_docs(
    counted: Callable[[], float], pflop: float
) -> None:
    """docs/models.md and docs/gpu.md; the counter runs the real forward on the meta device."""
    assert counted() / 1e15 == pytest.approx(pflop, abs=0.02)


def test_executed_flops_are_divided_by_a_minimum_that_nothing_undercuts() -> None:
    """One layer of width 2, LoRA of rank 1 on its attention; a prompt of 4 tokens, two completions
    of 3: 10 tokens, 10 + 4 * 6 + 2 * 6 = 46 pairs."""
    attention = tuple(toy.LORA["target_modules"])
    model = LanguageModel(1, 2, 3, 1, 1, 2, vocabulary=5, lora_rank=1, lora_targets=attention)
    matrices, adapters, scores = 4 * 4 + 3 * 6, 4 * (2 + 2), 4 * 2 * 46
    forwards = 2 * (matrices + adapters) * 10 + 2 * matrices * 10 + 2 * scores
    # q, k and v: no gradient of the inputs of their matrices (4 each) and of the adapters (2 each).
    inputs, weights = 2 * (matrices + adapters - 3 * 4 - 3 * 2), 2 * adapters
    backward = (inputs + weights) * 10 + 5 * scores // 2
    least = forwards + backward + 3 * (2 * 2 * 5) * 6

    def over_minimum(executed: float) -> float:
        gflop = {"policy side": executed / 1e9, "vision tower": 1e-6}
        setup = {"positions": 20, "gflop": gflop}
        return experiments._over_minimum(setup, Shape(group=2, completion_tokens=3), model)

    assert over_minimum(least) == pytest.approx(1)
    assert over_minimum(1.5 * least + 500) == pytest.approx(1.5)
    with pytest.raises(ValueError, match=f"executed {least + 999} FLOPs, .* of {least + 1000}:"):
        over_minimum(least - 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("toy")
    toy.save_models(path)
    return path


def test_both_sides_read_the_same_prompt_and_completions(folder: Path) -> None:
    from transformers import AutoTokenizer

    from tiny_world.builder.tokenizer import SYSTEM_PROMPT

    tokenizer = AutoTokenizer.from_pretrained(folder / "policy")
    shape = Shape()
    row = toy.make_sample(3, shape)
    messages = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": row.instruction}]},
    ]
    chat = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    section = toy.renderer_section(folder, shape)
    template = QwenImageEdit.prompt_template(QwenImageEdit.Config(**section))
    picture = "<|vision_start|><|image_pad|><|vision_end|>"
    ours = template.text.replace("{image}", picture).replace("{instruction}", row.instruction)
    assert chat == ours
    assert len(tokenizer(template.drop_prefix).input_ids) == 64
    texts = toy.make_completions(row.instruction, shape)
    assert len(set(texts)) == shape.group
    ids = [toy.completion_ids(tokenizer, text) for text in texts]
    assert {len(one) for one in ids} == {shape.completion_tokens}
    for text, one in zip(texts, ids, strict=True):
        assert tokenizer.decode(one, skip_special_tokens=True) == text


def test_the_tuned_peer_computes_what_the_plain_peer_does(folder: Path) -> None:
    """One forward of the prompt with cached picture features equals the padded batch."""
    from transformers import Qwen2_5_VLForConditionalGeneration

    shape = Shape(group=3, picture_px=112, completion_tokens=9)
    row, processor = toy.make_sample(0, shape), trl_worker.make_processor(folder / "policy")
    text = "<|vision_start|><|image_pad|><|vision_end|>" + row.instruction
    prompt = dict(processor(text=[text], images=[row.source], return_tensors="pt"))
    texts = toy.make_completions(row.instruction, shape)
    ids = torch.tensor([toy.completion_ids(processor.tokenizer, text) for text in texts])
    batch = {name: torch.cat([tensor] * 3) for name, tensor in prompt.items()}
    for name, tail in (
        ("input_ids", ids),
        ("attention_mask", torch.ones_like(ids)),
        ("mm_token_type_ids", torch.zeros_like(ids)),
    ):
        batch[name] = torch.cat([batch[name], tail], dim=1)
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder / "policy")
    body, weight = model.model, model.model.language_model.layers[0].self_attn.k_proj.weight
    num_prompt = prompt["input_ids"].shape[1]
    plain = body(**batch, use_cache=False).last_hidden_state
    expected = torch.autograd.grad(plain[:, num_prompt:].square().sum(), weight)[0]

    trl_tunings.cache_features(body)
    tower, tower_calls = body.visual.forward, []
    body.visual.forward = lambda *args, **kwargs: tower_calls.append(1) or tower(*args, **kwargs)
    for _ in range(2):
        prompt_states, row_states = trl_tunings.prompt_once(body, prompt, ids)
    assert len(tower_calls) == 1
    gradient = torch.autograd.grad(row_states.square().sum(), weight)[0]
    torch.testing.assert_close(prompt_states, plain[0, :num_prompt], rtol=0, atol=1e-5)
    torch.testing.assert_close(row_states, plain[:, num_prompt:], rtol=0, atol=1e-5)
    trl_tunings.assert_equal(gradient, expected, scale=float(expected.abs().max()))
    with pytest.raises(AssertionError, match="from plain TRL"):
        trl_tunings.assert_equal(gradient + 1, expected, scale=0.0)
