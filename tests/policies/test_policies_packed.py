"""The packed forward against transformers on one row at a time, in float32 on a CPU."""

from __future__ import annotations

from dataclasses import replace

import padded_reference
import pytest
import tiny_emu3
import tiny_qwen
import tiny_qwen3
import torch
from tiny_act import act
from tiny_policy import TEMPERATURE, make_emu3, make_qwen, move, trainable
from tiny_rounding import GRADIENT_TOL
from torch.utils.flop_counter import FlopCounterMode

from rl.policies.packing import completion_spans

LENGTHS = ((7, 1, 0, 12), (3,), (9, 9))
"""Completion lengths of three groups."""


@pytest.fixture(scope="module")
def qwen_folder(tmp_path_factory) -> str:
    return tiny_qwen.save_policy_folder(tmp_path_factory.mktemp("qwen"))


def random_rows(prompts) -> list[tuple]:
    generator = torch.Generator().manual_seed(0)
    return [
        (prompt, tuple(torch.randint(10, 250, (length,), generator=generator).tolist()))
        for prompt, lengths in zip(prompts, LENGTHS, strict=True)
        for length in lengths
    ]


def pictured_rows(policy) -> list[tuple]:
    """Rows of three prompts with pictures of different sizes."""
    sizes = ((128, 64), (64, 96), (64, 64))
    samples = [tiny_qwen.sample(i, width=w, height=h) for i, (w, h) in enumerate(sizes)]
    return random_rows([policy.build_prompt(sample) for sample in samples])


def mixed_rows(policy) -> list[tuple]:
    """Rows of three prompts: three pictures, none, and one of the three."""
    samples = [tiny_qwen.sample(i) for i in range(3)]
    several = (*samples[0].sources, tiny_qwen.picture(1, 128, 64), tiny_qwen.picture(2, 64, 96))
    variants = [
        replace(samples[0], sources=several),
        replace(samples[1], sources=()),
        replace(samples[2], sources=several[1:2]),
    ]
    return random_rows([policy.build_prompt(sample) for sample in variants])


def painted_rows(policy) -> list[tuple]:
    """Pictures of two grids, one after a thought, one cut off; only words; an empty completion."""
    samples = [tiny_emu3.sample(0), tiny_emu3.sample(1, height=2, width=3)]
    first, second = (policy.build_prompt(sample) for sample in samples)
    write = policy.prompts.picture_completion
    return [
        (first, write(samples[0].target_codes)),
        (first, write(samples[1].target_codes)[:9]),
        (first, ()),
        (second, write(samples[1].target_codes, thought=" a red sky")),
        (second, policy.encode_completion("no idea").token_ids),
    ]


def emu3_alone(policy, prompt, ids) -> tuple[torch.Tensor, torch.Tensor]:
    """(states, log-probs) of one row; the ids that the grid allows for each token are derived here
    from the position of the image token."""
    model, picture = policy.module.base_model, policy.prompts.vocabulary.picture
    states = padded_reference.emu3_states(model, prompt, ids)
    height, width = prompt.grid
    image_index = ids.index(picture.image) if picture.image in ids else len(ids)
    allowed = []
    for t, token in enumerate(ids):
        row, column = divmod(t - image_index - 1, width + 1)
        forced = t > image_index and (column == width or row >= height)
        slice_ids = range(picture.visual_start)
        if token >= picture.visual_start:
            slice_ids = range(picture.visual_start, picture.visual_end)
        allowed.append([token] if forced else slice_ids)
    head = model.lm_head.weight
    return states, padded_reference.logprobs(states, head, ids, TEMPERATURE, allowed)


def make_chatting(folder: str, **section):
    """Without a renderer's template: the chat format, in which a picture is optional."""
    return make_qwen(folder, "text", template=None, **section)


def make_deepstack(folder: str, state_kind: str, **section):
    return tiny_qwen3.make_qwen3(folder, template=None, section=section, state_kind=state_kind)


ADAPTER = {"r": 4, "alpha": 8}
TOWER_TOO = {
    "lora": {**ADAPTER, "target_modules": ["q_proj", "down_proj", "qkv", "proj", "linear_fc1"]},
    "freeze_vision_tower": False,
}
PRE_NORM = {"state_kind": "pre_norm"}
CASES = {
    "pictures": (tiny_qwen, make_qwen, {}, pictured_rows),
    "0, 1, 3 pictures, all trained": (tiny_qwen, make_chatting, {"lora": None}, mixed_rows),
    "deepstack": (tiny_qwen3, make_deepstack, {"state_kind": "post_norm"}, mixed_rows),
    "pre-norm, all trained": (tiny_qwen3, make_deepstack, PRE_NORM | {"lora": None}, mixed_rows),
    "pre-norm, tower too": (tiny_qwen3, make_deepstack, PRE_NORM | TOWER_TOO, mixed_rows),
    "codes": (tiny_emu3, make_emu3, {"lora": ADAPTER}, painted_rows),
    "codes, all trained": (tiny_emu3, make_emu3, {}, painted_rows),
}
"""Name -> family, builder of the policy, its config keys, builder of its rows."""


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
def test_log_probs_states_and_gradients_equal_those_of_each_row_alone(case, tmp_path):
    family, build, section, make_rows = CASES[case]
    alone = emu3_alone if family is tiny_emu3 else padded_reference.qwen_row
    policy = build(family.save_policy_folder(tmp_path), **section)
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


def test_conditioning_equals_that_of_each_row_alone_and_keeps_no_graph(qwen_folder):
    policy = make_qwen(qwen_folder)
    move(policy)
    rows = pictured_rows(policy)
    batch = policy.collate(rows)
    outputs = policy.module(batch)
    for (prompt, ids), action in zip(
        rows, policy.decode_actions(rows, batch, outputs), strict=True
    ):
        states = padded_reference.qwen_states(policy.module.base_model, prompt, ids)[64:]
        embeds = action.payload.embeds
        assert (embeds - states).norm() <= 1e-6 * states.norm()
        assert not embeds.requires_grad
        assert embeds.untyped_storage().nbytes() == embeds.nbytes, "a copy, not a view"


@pytest.mark.parametrize(
    ("lora", "checkpointing"),
    [({"r": 4, "alpha": 8}, False), ({"r": 4, "alpha": 8}, "mlp"), (None, True)],
)
def test_several_graphs_wait_for_their_backwards(qwen_folder, lora, checkpointing):
    """Backwards run in another order than forwards, after forwards of the reference and of negative
    prompts. Each gradient equals that of its part alone, also with recomputed activations."""
    policy = make_qwen(qwen_folder, negative=" ", checkpointing=checkpointing, lora=lora)
    plain = make_qwen(qwen_folder, lora=lora)
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
        grads = [p.grad for p in trainable(policy).values()]
        assert distance(grads, expected[i]) < 1e-6


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


def test_an_extra_completion_keeps_memory_for_its_own_tokens_only(qwen_folder):
    """A padded row would have 100 tokens, 16 of them the completion's. Checkpointing keeps less;
    without a graph nothing is kept."""
    policy = make_qwen(qwen_folder)
    policy.module.train()
    prompt = policy.build_prompt(tiny_qwen.sample(0, width=112, height=112))
    assert len(prompt.token_ids) == 84
    rows = [(prompt, tuple(range(10, 26)))] * 8
    one, two, eight = (graph_bytes(policy, rows[:n]) for n in (1, 2, 8))
    assert (eight - two) / 6 < 0.2 * one
    halves = graph_bytes(make_qwen(qwen_folder, checkpointing="mlp"), rows)
    assert halves < 0.65 * eight
    with torch.no_grad():
        assert graph_bytes(policy, rows) == 0


def test_linear_layers_see_each_token_once(qwen_folder):
    """FLOPs of the matrix products agree with the formula: no padding, each prompt once, and the
    head only on completion tokens."""
    policy = make_qwen(qwen_folder, lora=None)
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
