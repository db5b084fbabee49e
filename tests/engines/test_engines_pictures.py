"""Pictures written as tokens: both engines against a masked softmax of the stock model.

Axes: `_P` prompts, `_PG` the completions of each prompt.
"""

from dataclasses import replace

import padded_reference
import pytest
import tiny_image_writer as tiny
from tiny_calls import noted_calls
from tiny_emu3 import save_published_folder
from tiny_engines import assert_follows, pairs, plain_engine, sampling, started, token_ids
from tiny_policy import make, saved
from tiny_rounding import FORWARD_TOL

from rl.engines import vllm as vllm_engine

SEEDS = [7, 70, 700, 7000]
PARAMS = sampling(max_tokens=60, num_completions=6)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def stock():
    return padded_reference.stock(saved("emu3", fond_of_pictures=True))


@pytest.fixture(scope="module")
def policy():
    return make(saved("emu3", fond_of_pictures=True), temperature=1.0, max_prompt_tokens=64)


@pytest.fixture(scope="module")
def prompts_P(policy):
    return tiny.build_prompts(policy)


@pytest.fixture(scope="module")
def vllm(policy):
    """One engine for the whole file; its small cache makes a large batch preempt requests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_engine, "CPU_CACHE_BYTES", 1 << 20)
        with started(policy, max_num_seqs=64) as engine:
            yield engine


@pytest.fixture(scope="module")
def transformers(policy):
    return plain_engine(policy)


@pytest.fixture(params=["vllm", "transformers"])
def engine(request):
    return request.getfixturevalue(request.param)


def assert_reference(stock, policy, prompts_P, completions_PG, *settings) -> None:
    """Log-probs are those of the stock model; `settings`: temperature, top_k, top_p."""
    for prompt, completion in pairs(prompts_P, completions_PG):
        expected = tiny.reference_logprobs(
            stock, prompt, completion, policy.image_vocabulary, *settings
        )
        assert completion.logprobs == pytest.approx(expected, abs=FORWARD_TOL)
        if prompt.grid is None:
            assert completion.forced is None
        else:
            assert completion.forced == tiny.expected_forced(
                completion.token_ids, prompt.grid, policy.image_vocabulary
            )


@pytest.mark.parametrize(("temperature", "max_tokens"), [(1.0, 60), (0.7, 60), (1.0, 20)])
def test_logprobs_and_forced_flags_of_mixed_grids(
    engine, policy, prompts_P, stock, temperature, max_tokens, monkeypatch
):
    """Prompts with four grids and one without a grid in a batch, against an independent masked
    softmax. A limit of 20 tokens ends some pictures in the middle."""
    vocabulary, decoder = policy.image_vocabulary, policy.decoder
    # An Emu3 expects a grid in every prompt that its decoder gets.
    monkeypatch.setattr(
        policy, "decoder", lambda P, n: decoder([replace(p, grid=(1, 1)) for p in P], n)
    )
    mixed_P = [*prompts_P, replace(prompts_P[0], grid=None)]
    params = replace(PARAMS, temperature=temperature, max_tokens=max_tokens)
    completions_PG = engine.generate(mixed_P, params, [*SEEDS, 1])
    assert_reference(stock, policy, mixed_P, completions_PG, temperature)
    num_whole = num_cut = 0
    for prompt, completion in pairs(prompts_P, completions_PG[:-1]):
        ids = completion.token_ids
        forced = [x for x, flag in zip(completion.logprobs, completion.forced, strict=True) if flag]
        assert all(x == 0.0 for x in forced), "exactly 0"
        ended = ids[-1] == vocabulary.end_of_sequence
        assert completion.finish == ("stop" if ended else "length")
        if vocabulary.image in ids and not ended:
            num_cut += 1
        elif vocabulary.image in ids:
            num_whole += 1
            [action] = policy.decode_actions([(prompt, ids)], None, None)
            assert action.payload.shape == prompt.grid
    assert num_cut > 0 if max_tokens == 20 else num_whole >= 10
    drawn = {token for completion in completions_PG[-1] for token in completion.token_ids}
    assert max(drawn) >= vocabulary.visual_start, "codes are allowed"


@pytest.mark.parametrize(("top_k", "top_p"), [(5, 1.0), (-1, 0.6), (20, 0.77)])
def test_top_k_and_top_p_apply_after_the_grammar_mask(
    engine, policy, prompts_P, stock, top_k, top_p
):
    params = sampling(0.9, top_p, top_k, max_tokens=60)
    completions_PG = engine.generate(prompts_P, params, SEEDS)
    assert_reference(stock, policy, prompts_P, completions_PG, 0.9, top_k, top_p)


def test_both_engines_agree_when_greedy(vllm, transformers, prompts_P):
    greedy = replace(PARAMS, temperature=0.0, num_completions=2)
    by_vllm, plain = (e.generate(prompts_P, greedy, SEEDS) for e in (vllm, transformers))
    assert token_ids(by_vllm) == token_ids(plain)


def test_batch_order_does_not_matter(engine, prompts_P):
    forward = token_ids(engine.generate(prompts_P, PARAMS, SEEDS))
    assert token_ids(engine.generate(prompts_P[::-1], PARAMS, SEEDS[::-1])[::-1]) == forward
    assert len({ids for group in forward for ids in group}) > 20


def test_preempted_requests_resume_correctly(vllm, policy, prompts_P, stock, monkeypatch):
    from vllm.v1.core.sched.scheduler import Scheduler

    preempted = noted_calls(
        monkeypatch, Scheduler, "_preempt_request", lambda args, *_: len(args[1].output_token_ids)
    )
    many_P, seeds = prompts_P * 10, list(range(0, 400, 10))
    completions_PG = vllm.generate(many_P, replace(PARAMS, num_completions=8), seeds)
    assert sum(length > 0 for length in preempted) > 5
    assert_reference(stock, policy, many_P, completions_PG)


def test_many_banned_ids_are_never_drawn(engine, policy, prompts_P, monkeypatch):
    """All language ids but a few are banned, so pictures start at once; forced ids still appear."""
    vocabulary = policy.image_vocabulary
    kept = {vocabulary.image, 5, 6}
    banned = tuple(i for i in range(vocabulary.visual_start) if i not in kept)
    monkeypatch.setattr(policy, "banned_token_ids", banned)
    if isinstance(engine, vllm_engine.VllmEngine):
        monkeypatch.setattr(engine, "_bans", dict.fromkeys(banned, vllm_engine.BANNED_BIAS))
    for prompt, completion in pairs(prompts_P, engine.generate(prompts_P, PARAMS, SEEDS)):
        chosen = [
            token
            for token, flag in zip(completion.token_ids, completion.forced, strict=True)
            if not flag and token < vocabulary.visual_start
        ]
        assert set(chosen) <= kept and vocabulary.image in chosen
        assert completion.finish == "stop"
        [action] = policy.decode_actions([(prompt, completion.token_ids)], None, None)
        assert action.payload.shape == prompt.grid


def test_vllm_follows_a_published_emu3(tmp_path):
    """vLLM cannot read a published folder's config and tokenizer itself."""
    policy = make(save_published_folder(tmp_path, fond_of_pictures=True))
    prompts_P = tiny.build_prompts(policy)
    with started(policy) as engine:
        params = sampling(0.7, max_tokens=50, num_completions=6)
        completions_PG = assert_follows(engine, policy, prompts_P, params)
    for prompt, group in zip(prompts_P, completions_PG, strict=True):
        rows = [(prompt, completion.token_ids) for completion in group]
        actions = policy.decode_actions(rows, None, None)
        pictures = [action.payload for action in actions if action.failure is None]
        assert pictures and all(codes.shape == prompt.grid for codes in pictures)
