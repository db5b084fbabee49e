"""Chunked log-probs and their gradients against one softmax over the full vocabulary."""

import pytest
import torch
from tiny_calls import calls_of
from tiny_rounding import FORWARD_TOL

from rl.policies.trained_module import sliced_logprobs, token_logprobs

NUM_TOKENS, WIDTH, VOCAB = 13, 16, 50
BANNED = torch.tensor([3, 48, 49])


def _inputs(dtype: torch.dtype = torch.float32):
    torch.manual_seed(0)
    hidden = torch.randn(NUM_TOKENS, WIDTH, dtype=dtype, requires_grad=True)
    head = torch.nn.Linear(WIDTH, VOCAB, bias=False, dtype=dtype)
    allowed = torch.tensor([i for i in range(VOCAB) if i not in BANNED.tolist()])
    return hidden, head, allowed[torch.randint(len(allowed), (NUM_TOKENS,))]


def _assert_plain(ours, hidden, head, ids, temperature, outside) -> None:
    """Compares (log-probs, entropy) and gradients with one float64 softmax. `outside`: [N, V] bool,
    the ids that a token is not drawn from."""
    logits = hidden.double() @ head.weight.double().T / temperature
    expected = logits.masked_fill(outside, float("-inf")).log_softmax(-1)
    chosen = expected.gather(-1, ids[:, None])[:, 0]
    logprobs, entropy = ours
    assert (logprobs - chosen).abs().max() < 1e-6
    assert (entropy - torch.special.entr(expected.exp()).sum(-1)).abs().max() < 1e-6
    assert not entropy.requires_grad
    weights = torch.randn(len(ids))
    gradients, expected_gradients = (
        torch.autograd.grad((values * weights).sum(), [hidden, head.weight])
        for values in (logprobs, chosen)
    )
    for a, b in zip(gradients, expected_gradients, strict=True):
        assert (a - b).abs().max() < 1e-5


IS_BANNED = torch.isin(torch.arange(VOCAB), BANNED)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("logits_per_chunk", [1, 4 * VOCAB, 10**6])
def test_equal_to_the_plain_softmax_in_value_and_gradient(temperature, logits_per_chunk):
    hidden, head, ids = _inputs()
    ours = token_logprobs(hidden, head, ids, temperature, BANNED, logits_per_chunk)
    _assert_plain(ours, hidden, head, ids, temperature, IS_BANNED)


class SlicedLinear(torch.nn.Linear):
    def forward(self, hidden, start, end):
        return hidden @ self.weight[start:end].T


def test_each_slice_has_its_own_softmax_in_value_and_gradient(monkeypatch):
    """Slices are ids 0 to 29 and 30 to 44; 45 and above never occur; three tokens per chunk."""
    monkeypatch.setattr(token_logprobs, "__defaults__", (3 * 15,))
    hidden, _, _ = _inputs()
    head = SlicedLinear(WIDTH, VOCAB, bias=False)
    ids = torch.tensor([0, 44, 29, 30, 7, 31, 32, 1, 40, 2, 3, 35, 4])
    ours = sliced_logprobs(hidden, head, ids, 0.7, (0, 30, 45))
    outside = torch.tensor([[(v < 30) != (i < 30) or v >= 45 for v in range(VOCAB)] for i in ids])
    _assert_plain(ours, hidden, head, ids, 0.7, outside)


def test_only_one_chunk_of_logits_exists_at_a_time():
    hidden, head, ids = _inputs()
    rows = calls_of(head, lambda _args, _kwargs, output: len(output))
    token_logprobs(hidden, head, ids, 1.0, BANNED, logits_per_chunk=4 * VOCAB)[0].sum().backward()
    assert max(rows) == 4
    assert sum(rows) == 2 * NUM_TOKENS, "the backward computes each chunk again"


def test_log_probs_are_float32_for_a_bfloat16_head():
    hidden, head, ids = _inputs(torch.bfloat16)
    logprobs, entropy = token_logprobs(hidden, head, ids, 1.0, BANNED)
    assert logprobs.dtype == entropy.dtype == torch.float32
    exact = head(hidden).float().index_fill(-1, BANNED, float("-inf")).log_softmax(-1)
    expected, rounded = (
        all_ids.gather(-1, ids[:, None])[:, 0] for all_ids in (exact, exact.bfloat16().float())
    )
    # The median, because a logit that rounds the other way differs by 1e-2.
    assert (logprobs - expected).abs().median() <= FORWARD_TOL < (rounded - expected).abs().median()


def test_no_tokens_give_no_logprobs():
    hidden, head, ids = _inputs()
    logprobs, entropy = token_logprobs(hidden[:0], head, ids[:0], 1.0, BANNED)
    assert logprobs.shape == entropy.shape == (0,)


@pytest.mark.parametrize(("sharded", "calls"), [(True, 5), (False, 4)])
def test_a_sharded_head_is_called_equally_often_on_every_rank(monkeypatch, sharded, calls):
    """This rank has 4 chunks, another has 5. Only a sharded head must be called 5 times on both."""

    def all_reduce(tensor, op):
        assert (tensor.item(), op) == (4, torch.distributed.ReduceOp.MAX)
        assert sharded, "other ranks may not take part in this collective"
        tensor.fill_(5)

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    hidden, head, ids = _inputs()
    if sharded:
        head.weight.ds_id = 0
    rows = calls_of(head, lambda _args, _kwargs, output: len(output))
    ours = token_logprobs(hidden, head, ids, 1.0, BANNED, logits_per_chunk=4 * VOCAB)
    _assert_plain(ours, hidden, head, ids, 1.0, IS_BANNED)
    assert len(rows) == 2 * calls, "the backward gathers as often as the forward"
