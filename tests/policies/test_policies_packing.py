"""Positions and spans of a packed row, and its attention against a dense softmax with a mask."""

import pytest
import torch
from tiny_rounding import PRODUCT_TOL
from torch.nn.attention import varlen
from torch.utils.flop_counter import FlopCounterMode

from rl.algorithm import attention_kernels as kernels
from rl.api.types import PackedGroup, Prompt, Sample
from rl.policies import packing as packing
from rl.policies.attention import Packing, attention

GROUPS = (PackedGroup(0, 5, (3, 1, 0, 4)), PackedGroup(13, 2, (0,)), PackedGroup(15, 3, (6, 2)))
"""Groups (start, prompt length, completion lengths); lengths may be 0."""
NUM_TOKENS = 26
NUM_HEADS, NUM_KEY_HEADS, WIDTH = 4, 2, 8


def prompt(*ids: int) -> Prompt:
    return Prompt(Sample("", ""), token_ids=ids)


# By hand


def test_adjacent_rows_with_the_same_prompt_object_form_a_group():
    first, second = prompt(1, 2), prompt(1, 2)
    rows = [(first, (3, 4)), (first, ()), (second, (5,)), (first, (6,))]
    ids, groups, prompts = packing.pack(rows)
    assert ids == [1, 2, 3, 4, 1, 2, 5, 1, 2, 6]
    assert groups == (PackedGroup(0, 2, (2, 0)), PackedGroup(4, 2, (1,)), PackedGroup(7, 2, (1,)))
    assert [id(p) for p in prompts] == [id(first), id(second), id(first)]


def test_positions_of_completions_continue_from_the_largest_of_the_prompt():
    """The largest position may not be the last: rows and columns of a picture exceed its tokens."""
    groups = (PackedGroup(0, 3, (2, 1)), PackedGroup(6, 1, (2,)))
    prompt_positions = [torch.tensor([[0, 9, 1], [0, 4, 1]]), torch.tensor([[0], [7]])]
    expected = [[0, 9, 1, 10, 11, 10, 0, 8, 9], [0, 4, 1, 10, 11, 10, 7, 8, 9]]
    assert packing.positions(groups, prompt_positions).tolist() == expected
    plain = packing.positions(groups, [torch.arange(3), torch.arange(1)])
    assert plain.tolist() == [0, 1, 2, 3, 4, 3, 0, 1, 2]


def test_the_last_prompt_token_predicts_the_first_completion_token():
    groups = (PackedGroup(0, 3, (2, 0, 1)), PackedGroup(6, 1, (2,)))
    assert list(packing.completion_spans(groups)) == [(3, 5), (5, 5), (5, 6), (7, 9)]
    rows, columns, positions, predictors = packing.completion_tokens(groups).tolist()
    assert rows == [0, 0, 2, 3, 3]
    assert columns == [0, 1, 0, 0, 1]
    assert positions == [3, 4, 5, 7, 8]
    assert predictors == [2, 3, 2, 6, 7]


def test_runs_cover_the_row_and_completions_attend_to_their_prompt():
    plan = Packing(GROUPS, kernels.CPU)
    assert plan.own.query_lens == plan.own.key_lens == (5, 3, 1, 0, 4, 2, 0, 3, 6, 2)
    assert (plan.across.query_lens, plan.across.key_lens) == ((8, 0, 8), (5, 2, 3))
    assert plan.prompt_slices == [slice(0, 5), slice(13, 15), slice(15, 18)]
    assert plan.completion_slices == [slice(5, 13), slice(15, 15), slice(18, 26)]


# Attention


def visible() -> torch.Tensor:
    """[S, S] bool: whether token i attends to token j, from the definition."""
    prompt_of, run_of = [], []
    for g, group in enumerate(GROUPS):
        for run, length in enumerate((group.prompt_len, *group.completion_lens)):
            prompt_of += [g] * length
            run_of += [(g, run)] * length
    see = torch.zeros(NUM_TOKENS, NUM_TOKENS, dtype=torch.bool)
    for i in range(NUM_TOKENS):
        for j in range(i + 1):
            see[i, j] = run_of[i] == run_of[j] or run_of[j] == (prompt_of[i], 0)
    return see


def inputs() -> list[torch.Tensor]:
    """Query, key and value [1, H, S, D], the layout of transformers."""
    torch.manual_seed(0)
    heads = (NUM_HEADS, NUM_KEY_HEADS, NUM_KEY_HEADS)
    return [torch.randn(1, n, NUM_TOKENS, WIDTH, requires_grad=True) for n in heads]


def dense(query, key, value) -> torch.Tensor:
    """Attention with the dense mask, [1, S, H, D] float64."""
    share = NUM_HEADS // NUM_KEY_HEADS
    key, value = (x.double().repeat_interleave(share, dim=1) for x in (key, value))
    scores = query.double() @ key.transpose(-1, -2) / WIDTH**0.5
    probs = scores.masked_fill(~visible(), float("-inf")).softmax(-1)
    return (probs @ value).transpose(1, 2)


def runs(query, key, value, starts_q, starts_k, is_causal):
    """For each run: its slices of queries and keys, its values and scores, [H, Q, K]; the causal
    mask is bottom-right."""
    share = query.shape[1] // key.shape[1]
    for run in range(len(starts_q) - 1):
        q, k = (slice(*starts[run : run + 2]) for starts in (starts_q, starts_k))
        keys, values = (x[k].repeat_interleave(share, dim=1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[q], keys) / query.shape[-1] ** 0.5
        if is_causal:
            num_q, num_k = scores.shape[1:]
            late = torch.arange(num_k) > torch.arange(num_q)[:, None] + num_k - num_q
            scores = scores.masked_fill(late, float("-inf"))
        yield q, k, keys, values, scores


def slow_varlen(query, key, value, starts_q, starts_k, max_q, max_k, is_causal):
    """The documented result of `torch.nn.attention.varlen`."""
    assert starts_q.dtype == starts_k.dtype == torch.int32
    assert int(starts_q[-1]) == len(query) and int(starts_k[-1]) == len(key) == len(value)
    assert max_q == starts_q.diff().max() and max_k == starts_k.diff().max()
    out, lse = torch.zeros_like(query), torch.zeros(query.shape[1], len(query))
    for q, _, _, values, scores in runs(query, key, value, starts_q, starts_k, is_causal):
        lse[:, q] = scores.logsumexp(-1)
        out[q] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
    return out, lse, torch.zeros(2)


def slow_varlen_backward(
    grad, query, key, value, out, lse, starts_q, starts_k, max_q, max_k, is_causal, state
):
    """Uses the given `out` and `lse`, as the flash kernel does: probabilities may not sum to 1."""
    grads = [torch.zeros_like(x) for x in (query, key, value)]
    for q, k, keys, values, scores in runs(query, key, value, starts_q, starts_k, is_causal):
        probs = (scores - lse[:, q, None]).exp()
        inner = (grad[q] * out[q]).sum(-1).T[..., None]
        by_probs = torch.einsum("qhd,khd->hqk", grad[q], values)
        by_scores = probs * (by_probs - inner) / query.shape[-1] ** 0.5
        grads[0][q] = torch.einsum("hqk,khd->qhd", by_scores, keys)
        for grad_k, by, rows in ((grads[1], by_scores, query), (grads[2], probs, grad)):
            part = torch.einsum("hqk,qhd->khd", by, rows[q])
            grad_k[k] = part.unflatten(1, (key.shape[1], -1)).sum(2)
    return tuple(grads)


@pytest.mark.parametrize("other", [{"scaling": 0.3}, {"sliding_window": 4}, {"softcap": 30.0}])
def test_attention_of_another_kind_is_refused(other):
    with pytest.raises(ValueError, match="cannot be a policy"):
        attention(None, *inputs(), None, packing=Packing(GROUPS, kernels.CPU), **other)


@pytest.mark.parametrize("kernel", [kernels.CPU, kernels.PLAIN, kernels.VARLEN])
def test_attention_and_its_gradients_equal_those_with_a_dense_mask(kernel, monkeypatch):
    """A slow stand-in answers the calls of the CUDA kernel, so that their arguments are tested."""
    monkeypatch.setattr(varlen, "_varlen_attn", slow_varlen)
    monkeypatch.setattr(varlen, "_varlen_attn_backward", slow_varlen_backward)
    tensors = inputs()
    scale = tensors[0].shape[-1] ** -0.5
    ours, _ = attention(None, *tensors, None, packing=Packing(GROUPS, kernel), scaling=scale)
    expected = dense(*tensors)
    assert (ours - expected).abs().max() < PRODUCT_TOL
    weights = torch.randn(ours.shape)
    ours_grads = torch.autograd.grad((ours * weights).sum(), tensors)
    expected_grads = torch.autograd.grad((expected * weights).sum(), tensors)
    for a, b in zip(ours_grads, expected_grads, strict=True):
        assert (a - b).abs().max() < PRODUCT_TOL


def test_only_visible_pairs_are_computed_and_no_key_is_copied():
    """Counts the multiplications; the graph keeps query, key, value, the result and its sums."""
    pairs = []

    def count(query, key, value, dropout=0.0, causal=False, out_shape=None):
        (batch, heads, num_q, _), num_k = query, key[2]
        pairs.append(batch * heads * (num_q * (num_q + 1) // 2 if causal else num_q * num_k))
        return 0

    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    tensors, kept = inputs(), []
    with (
        FlopCounterMode(display=False, custom_mapping={operator: count}),
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t), lambda t: t),
    ):
        attention(None, *tensors, None, packing=Packing(GROUPS, kernels.CPU))
    assert sum(pairs) == NUM_HEADS * int(visible().sum())
    numbers = NUM_TOKENS * (2 * NUM_HEADS * WIDTH + 2 * NUM_KEY_HEADS * WIDTH + NUM_HEADS)
    assert sum(tensor.numel() for tensor in kept) == numbers


def test_the_kernel_is_chosen_by_device_and_dtype():
    assert kernels.choose_kernel("auto", "cpu", torch.bfloat16) is kernels.CPU
    assert kernels.choose_kernel("sdpa", "cpu", torch.float32) is kernels.CPU
