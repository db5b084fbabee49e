"""Pictures written as tokens: both engines against a masked softmax of the stock model.

Axes: `_P` prompts, `_PG` the completions of each prompt.
"""

from dataclasses import replace

import pytest
import tiny_image_writer as tiny
import torch
from tiny_rounding import FORWARD_TOL
from vllm.v1.core.sched.scheduler import Scheduler

from rl.api.engine import EngineSetup
from rl.api.plugin import PluginConfig
from rl.api.types import SamplingParams
from rl.engines import transformers as transformers_engine
from rl.engines import vllm as vllm_engine

SEEDS = [7, 70, 700, 7000]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save_writer_folder(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def stock(folder):
    from transformers import Emu3ForCausalLM

    return Emu3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def policy(folder):
    return tiny.build_policy(folder)


@pytest.fixture(scope="module")
def prompts_P(policy):
    return tiny.build_prompts(policy)


@pytest.fixture(scope="module")
def vllm(policy):
    """One engine for the whole file; its small cache makes a large batch preempt requests."""
    config = vllm_engine.Config(type="vllm", max_num_seqs=64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_engine, "CPU_CACHE_BYTES", 1 << 20)
        engine = vllm_engine.VllmEngine(config, EngineSetup(policy, "cpu"))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def transformers(policy):
    config = PluginConfig(type="transformers")
    return transformers_engine.TransformersEngine(config, EngineSetup(policy, "cpu"))


@pytest.fixture(params=["vllm", "transformers"])
def engine(request):
    return request.getfixturevalue(request.param)


def params(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=60, num_completions=6):
    return SamplingParams(temperature, top_p, top_k, max_tokens, num_completions)


def pairs(prompts_P, completions_PG):
    return [(p, c) for p, group in zip(prompts_P, completions_PG, strict=True) for c in group]


def max_dlogp(sampled, expected) -> float:
    return max(abs(a - b) for a, b in zip(sampled, expected, strict=True))


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
    completions_PG = engine.generate(
        mixed_P, params(temperature, max_tokens=max_tokens), [*SEEDS, 1]
    )
    num_whole = num_cut = 0
    for prompt, completion in pairs(mixed_P, completions_PG):
        expected = tiny.reference_logprobs(stock, prompt, completion, vocabulary, temperature)
        assert max_dlogp(completion.logprobs, expected) <= FORWARD_TOL
        if prompt.grid is None:
            assert completion.forced is None
            continue
        ids = completion.token_ids
        assert completion.forced == tiny.expected_forced(ids, prompt.grid, vocabulary)
        forced = [x for x, flag in zip(completion.logprobs, completion.forced, strict=True) if flag]
        assert all(x == 0.0 for x in forced), "exactly 0"
        ended = ids[-1] == vocabulary.end_of_sequence
        assert completion.finish == ("stop" if ended else "length")
        if vocabulary.image in ids:
            num_whole += completion.finish == "stop"
            num_cut += completion.finish == "length"
            if completion.finish == "stop":
                [action] = policy.decode_actions([(prompt, completion.token_ids)], None, None)
                assert action.payload.shape == prompt.grid
    assert num_cut > 0 if max_tokens == 20 else num_whole >= 10
    drawn = {token for c in completions_PG[-1] for token in c.token_ids}
    assert any(token >= vocabulary.visual_start for token in drawn), "codes are allowed"


@pytest.mark.parametrize("truncation", [{"top_k": 5}, {"top_p": 0.6}, {"top_k": 20, "top_p": 0.77}])
def test_top_k_and_top_p_apply_after_the_grammar_mask(engine, policy, prompts_P, stock, truncation):
    vocabulary = policy.image_vocabulary
    completions_PG = engine.generate(prompts_P, params(0.9, num_completions=4, **truncation), SEEDS)
    for prompt, completion in pairs(prompts_P, completions_PG):
        expected = tiny.reference_logprobs(stock, prompt, completion, vocabulary, 0.9, **truncation)
        assert max_dlogp(completion.logprobs, expected) <= FORWARD_TOL


def test_both_engines_agree_when_greedy(vllm, transformers, prompts_P):
    greedy = params(0.0, num_completions=2)
    assert [[c.token_ids for c in group] for group in vllm.generate(prompts_P, greedy, SEEDS)] == [
        [c.token_ids for c in group] for group in transformers.generate(prompts_P, greedy, SEEDS)
    ]


def test_batch_order_does_not_matter(engine, prompts_P):
    forward = engine.generate(prompts_P, params(), SEEDS)
    backward = engine.generate(prompts_P[::-1], params(), SEEDS[::-1])[::-1]
    assert [[c.token_ids for c in g] for g in forward] == [
        [c.token_ids for c in g] for g in backward
    ]
    assert len({c.token_ids for group in forward for c in group}) > 20


def test_preempted_requests_resume_correctly(vllm, policy, prompts_P, stock, monkeypatch):
    preempt, preempted = Scheduler._preempt_request, []

    def counting(scheduler, request, *args, **kwargs):
        preempted.append(len(request.output_token_ids))
        return preempt(scheduler, request, *args, **kwargs)

    monkeypatch.setattr(Scheduler, "_preempt_request", counting)
    vocabulary = policy.image_vocabulary
    many_P, seeds = prompts_P * 10, list(range(0, 400, 10))
    completions_PG = vllm.generate(many_P, params(num_completions=8), seeds)
    assert sum(length > 0 for length in preempted) > 5
    for prompt, completion in pairs(many_P, completions_PG):
        ids = completion.token_ids
        assert completion.forced == tiny.expected_forced(ids, prompt.grid, vocabulary)
        expected = tiny.reference_logprobs(stock, prompt, completion, vocabulary)
        assert max_dlogp(completion.logprobs, expected) <= FORWARD_TOL


def test_many_banned_ids_are_never_drawn(engine, policy, prompts_P, monkeypatch):
    """All language ids but a few are banned, so pictures start at once; forced ids still appear."""
    vocabulary = policy.image_vocabulary
    kept = {vocabulary.image, 5, 6}
    banned = tuple(i for i in range(vocabulary.visual_start) if i not in kept)
    monkeypatch.setattr(policy, "banned_token_ids", banned)
    if isinstance(engine, vllm_engine.VllmEngine):
        monkeypatch.setattr(engine, "_bans", dict.fromkeys(banned, vllm_engine.BANNED_BIAS))
    for prompt, completion in pairs(prompts_P, engine.generate(prompts_P, params(), SEEDS)):
        chosen = [
            token
            for token, flag in zip(completion.token_ids, completion.forced, strict=True)
            if not flag and token < vocabulary.visual_start
        ]
        assert set(chosen) <= kept and vocabulary.image in chosen
        assert completion.finish == "stop"
        [action] = policy.decode_actions([(prompt, completion.token_ids)], None, None)
        assert action.payload.shape == prompt.grid
