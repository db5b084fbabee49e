"""The packed forward against transformers on one row at a time, in float32 on a CPU."""

from __future__ import annotations

import padded_reference
import pytest
import tiny_qwen
import torch
from tiny_act import act
from tiny_policy import ADAPTER, make, move, trainable
from tiny_rounding import GRADIENT_TOL
from tiny_rows import mixed_rows, painted_rows, pictured_rows
from torch.utils.flop_counter import FlopCounterMode

from rl.policies.packing import completion_spans

TOWER_TOO = {
    "lora": {**ADAPTER, "target_modules": ["q_proj", "down_proj", "qkv", "proj", "linear_fc1"]},
    "freeze_vision_tower": False,
}
CHATTING = {"kind": "text", "template": None}
"""Without a renderer's template: the chat format, in which a picture is optional."""
PRE_NORM = {"state_kind": "pre_norm", "template": None}
CASES = {
    "pictures": ("qwen2_5_vl", {}, pictured_rows),
    "0, 1, 3 pictures, all trained": ("qwen2_5_vl", CHATTING | {"lora": None}, mixed_rows),
    "deepstack": ("qwen3_vl", {"template": None}, mixed_rows),
    "pre-norm, all trained": ("qwen3_vl", PRE_NORM | {"lora": None}, mixed_rows),
    "pre-norm, tower too": ("qwen3_vl", PRE_NORM | TOWER_TOO, mixed_rows),
    "codes": ("emu3", {"lora": ADAPTER}, painted_rows),
    "codes, all trained": ("emu3", {}, painted_rows),
}
"""Name -> family, keys of the policy, builder of its rows."""


def gradients(policy, losses) -> list[torch.Tensor]:
    """Gradients of the losses' weighted sum; zeros for parameters that the losses do not reach."""
    total = sum(
        (torch.linspace(-1, 1, len(loss), dtype=loss.dtype) * loss).sum() for loss in losses
    )
    parameters = list(trainable(policy).values())
    grads = torch.autograd.grad(total, parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, grads, strict=True)]


def distance(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """Norm of the difference, divided by the norm of `theirs`."""
    flat = [torch.cat([g.double().flatten() for g in grads]) for grads in (ours, theirs)]
    return float((flat[0] - flat[1]).norm() / flat[1].norm())


@pytest.mark.parametrize("case", CASES)
def test_log_probs_states_and_gradients_equal_those_of_each_row_alone(case):
    family, keys, make_rows = CASES[case]
    alone = padded_reference.emu3_row if family == "emu3" else padded_reference.qwen_row
    policy = make(family, **keys)
    move(policy, 0.02)
    rows = make_rows(policy)
    batch = policy.collate(rows)
    outputs = policy.module(batch)
    prompts_B = [group for group in batch.groups for _ in group.completion_lens]
    spans_B = completion_spans(batch.groups)
    ours, theirs = [], []
    for b, ((prompt, ids), group, (start, end)) in enumerate(
        zip(rows, prompts_B, spans_B, strict=True)
    ):
        states, logprobs = alone(policy, prompt, ids)
        prompt_states = outputs.hidden[group.start : group.start + group.prompt_len]
        packed = torch.cat([prompt_states, outputs.hidden[start:end]])
        assert (packed - states).norm() <= 1e-6 * states.norm()
        ours.append(outputs.logprobs[b, : len(ids)])
        theirs.append(logprobs)
        assert torch.allclose(ours[-1].double(), logprobs.double(), rtol=0, atol=1e-5)
        assert not outputs.logprobs[b, len(ids) :].any()
    assert distance(gradients(policy, ours), gradients(policy, theirs)) < GRADIENT_TOL


@pytest.mark.parametrize(
    ("family", "state_kind"),
    [("qwen2_5_vl", "post_norm"), ("qwen3_vl", "post_norm"), ("qwen3_vl", "pre_norm")],
)
def test_conditioning_equals_that_of_each_row_alone_and_keeps_no_graph(family, state_kind):
    policy = make(family, state_kind=state_kind)
    move(policy)
    rows = pictured_rows(policy)
    batch = policy.collate(rows)
    outputs = policy.module(batch)
    for (prompt, ids), action in zip(
        rows, policy.decode_actions(rows, batch, outputs), strict=True
    ):
        states = padded_reference.qwen_row(policy, prompt, ids)[0][prompt.num_dropped_tokens :]
        embeds = action.payload.embeds
        assert (embeds - states).norm() <= 1e-6 * states.norm()
        assert not embeds.requires_grad
        assert embeds.untyped_storage().nbytes() == embeds.nbytes, "a copy, not a view"


@pytest.mark.parametrize(
    ("lora", "checkpointing"), [(ADAPTER, False), (ADAPTER, "mlp"), (None, True)]
)
def test_several_graphs_wait_for_their_backwards(lora, checkpointing):
    """Backwards run in another order than forwards, after forwards of the reference and of negative
    prompts. Each gradient equals that of its part alone, also with recomputed activations."""
    policy = make(negative_prompt=" ", gradient_checkpointing=checkpointing, lora=lora)
    plain = make(lora=lora)
    for one in (policy, plain):
        move(one, 0.02)
        one.module.train()
    rows = pictured_rows(policy)
    parts = [rows[:4], rows[4:5], rows[5:]]
    expected = []
    for part in parts:
        plain.module.zero_grad()
        plain.module(plain.collate(part)).logprobs.sum().backward()
        expected.append([p.grad for p in trainable(plain).values()])

    graphs = [policy.module(policy.collate(part)).logprobs for part in parts]
    with torch.no_grad(), policy.reference():
        policy.module(policy.collate(rows))
    act(policy, rows)
    for i in (2, 0, 1):
        policy.module.zero_grad()
        graphs[i].sum().backward()
        assert distance([p.grad for p in trainable(policy).values()], expected[i]) < 1e-6


def graph_bytes(policy, rows) -> int:
    """Bytes that a forward keeps for its backward, without the weights."""
    weights = {p.untyped_storage().data_ptr() for p in policy.module.parameters()}
    kept = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        policy.module(policy.collate(rows))
    return sum(size for size, _ in kept.values())


def test_an_extra_completion_keeps_memory_for_its_own_tokens_only():
    """A padded row would have 100 tokens, 16 of them the completion's. Checkpointing keeps less;
    without a graph nothing is kept."""
    policy = make()
    policy.module.train()
    prompt = policy.build_prompt(tiny_qwen.sample(0, width=112, height=112))
    assert len(prompt.token_ids) == 84
    rows = [(prompt, tuple(range(10, 26)))] * 8
    one, two, eight = (graph_bytes(policy, rows[:n]) for n in (1, 2, 8))
    assert (eight - two) / 6 < 0.2 * one
    assert graph_bytes(make(gradient_checkpointing="mlp"), rows) < 0.65 * eight
    with torch.no_grad():
        assert graph_bytes(policy, rows) == 0


def test_linear_layers_see_each_token_once():
    """FLOPs of the matrix products agree with the formula: no padding, each prompt once, and the
    head only on completion tokens."""
    policy = make(lora=None)
    rows = pictured_rows(policy)
    batch = policy.collate(rows)
    policy.module(batch)  # computes the picture features, which are kept
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        policy.module(batch)
    size = policy.module.base_model.config.text_config
    width, keys = size.hidden_size, size.hidden_size // size.num_attention_heads
    per_token = 2 * width * (2 * width + 2 * keys + 3 * size.intermediate_size)
    head = 2 * width * size.vocab_size * sum(len(ids) for _, ids in rows)
    num_tokens = sum(len(p.token_ids) for p in {row[0] for row in rows}) + sum(
        len(ids) for _, ids in rows
    )
    expected = size.num_hidden_layers * num_tokens * per_token + head
    assert counter.get_total_flops() == pytest.approx(expected, rel=1e-3)
