"""The real vLLM on a CPU against the trainer and the transformers engine (float32).

The files with vLLM's engine import vLLM in their tests: every worker imports every file, and few
run these."""

from dataclasses import replace

import pytest
import tiny_qwen
import torch
from tiny_calls import noted_calls
from tiny_engines import (
    assert_ended,
    assert_follows,
    assert_same,
    assert_seeded,
    export,
    max_dlogp,
    parameters_of,
    plain_engine,
    sampling,
    started,
)
from tiny_policy import make, move, trainable
from tiny_rounding import FORWARD_TOL

from rl.api.engine import EngineSetup
from rl.engines import vllm as vllm_engine

pytestmark = pytest.mark.slow

LORA = {"r": 4, "alpha": 6}
"""alpha / r = 1.5: the scaling the worker applies to B is not a no-op."""
PARAMS, SEEDS = sampling(), [7, 70, 700]


@pytest.fixture(scope="module")
def policy():
    return make(lora=LORA, temperature=1.0, max_prompt_tokens=192, max_completion_tokens=64)


@pytest.fixture(scope="module")
def engine(policy):
    """One engine for the whole file. Tests that change the policy's weights sync them."""
    threads, global_state = torch.get_num_threads(), torch.get_rng_state()
    with started(policy, max_num_seqs=128) as engine:
        assert torch.get_num_threads() == threads
        torch.set_num_threads(threads + 1)
        assert torch.get_num_threads() == threads + 1, "vLLM made set_num_threads a no-op"
        torch.set_num_threads(threads)
        assert torch.equal(torch.get_rng_state(), global_state), "vLLM seeded the generator"
        yield engine


@pytest.fixture(scope="module")
def prompts_P(policy):
    return [policy.build_prompt(tiny_qwen.sample(i, width=64 * (i + 1))) for i in range(3)]


@pytest.fixture
def synced(engine, policy):
    """The engine with the policy's current weights."""
    engine.load_weights(export(policy))
    return engine


@pytest.fixture
def worker(synced):
    """vLLM's own worker, after a sync."""
    [worker] = synced._llm.collective_rpc(lambda worker: worker)
    return worker


def test_logprobs_equal_the_trainers_after_every_update_and_sync(
    engine, policy, prompts_P, monkeypatch
):
    monkeypatch.setattr(policy.module, "temperature", 0.7)
    assert_follows(engine, policy, prompts_P, sampling(0.7), scale=0.05)


def test_a_sync_that_changed_nothing_is_detected(synced, policy, monkeypatch):
    before = export(policy)
    assert synced.held_fingerprint() == before.fingerprint
    move(policy, 0.02)
    after = export(policy, 1)
    assert after.fingerprint != before.fingerprint
    assert synced.held_fingerprint() == before.fingerprint != after.fingerprint

    def deliver_nothing(worker, *args):
        manager = worker.model_runner.lora_manager._adapter_manager
        add, manager.add_adapter = manager.add_adapter, lambda _: True
        remove, manager.remove_adapter = manager.remove_adapter, lambda _: True
        try:
            return put(worker, *args)
        finally:
            manager.add_adapter, manager.remove_adapter = add, remove

    put = vllm_engine.put_lora
    monkeypatch.setattr(vllm_engine, "put_lora", deliver_nothing)
    synced.load_weights(after)
    assert synced.held_fingerprint() not in (after.fingerprint, before.fingerprint)


def test_a_changed_bit_in_the_adapter_slots_is_detected(engine, policy, worker):
    fingerprint = export(policy).fingerprint
    assert engine.held_fingerprint() == fingerprint
    manager = worker.model_runner.lora_manager._adapter_manager
    layer = next(m for m in manager.modules.values() if m.lora_a_stacked[0].any())
    value = layer.lora_a_stacked[0][0, 0, 0, :1]
    value.copy_(torch.nextafter(value, torch.tensor(9.0)))
    assert engine.held_fingerprint() != fingerprint


def test_a_sync_drops_the_cache_of_the_old_weights(synced, policy, prompts_P):
    """The prompt's keys and values are kept between calls, and dropped by a sync: a group that
    reads the old ones is off by far more than rounding."""
    move(policy, 0.02)
    synced.generate(prompts_P, PARAMS, SEEDS)
    for drops, agrees in ((False, False), (True, True)):
        with pytest.MonkeyPatch.context() as patch:
            if not drops:
                patch.setattr("vllm.LLM.reset_prefix_cache", lambda _: True)
            synced.load_weights(export(policy))
        completions_PG = synced.generate(prompts_P, PARAMS, SEEDS)
        assert (max_dlogp(policy, prompts_P, completions_PG) <= FORWARD_TOL) == agrees


def test_a_groups_prompt_and_picture_are_read_once(synced, policy, monkeypatch):
    """The trainer's tower encodes it; its forward reuses the features. The engine has no tower."""
    from vllm.v1.core.sched.scheduler import Scheduler

    assert not any("visual" in name for name in parameters_of(synced))
    model = policy.module.base_model.model
    encoded = noted_calls(monkeypatch, model, "get_image_features", lambda args, *_: len(args[1]))
    num_scheduled = noted_calls(
        monkeypatch, Scheduler, "schedule", lambda _a, _k, plan: plan.total_num_scheduled_tokens
    )
    fresh_P = [policy.build_prompt(tiny_qwen.sample(900 + i, width=64 * (i + 1))) for i in range(3)]
    completions_PG = synced.generate(fresh_P, PARAMS, SEEDS)
    assert max_dlogp(policy, fresh_P, completions_PG) <= FORWARD_TOL
    assert encoded == [1, 1, 1], "three pictures, each encoded once and alone"
    tails = [len(prompt.token_ids) - 64 for prompt in fresh_P]
    assert all(0 < tail <= 32 for tail in tails)
    assert num_scheduled[0] == 64 + 4 * sum(tails), "equal blocks of 32 tokens are read once"


def test_syncing_never_touches_the_trainers_tensors_nor_the_base(synced, policy, prompts_P):
    """500 syncs: vLLM scales B in place, and merging would add up rounding errors in the base."""
    lora_before = {name: tensor.clone() for name, tensor in trainable(policy).items()}
    base = {n: p.detach().clone() for n, p in policy.module.named_parameters()}
    zero = policy.export_weights({n: torch.zeros_like(p) for n, p in lora_before.items()}, 0)
    synced.load_weights(zero)
    probe_before = synced.generate(prompts_P, PARAMS, SEEDS)
    weights = export(policy)
    for _ in range(500):
        synced.load_weights(weights)
    assert export(policy).fingerprint == weights.fingerprint
    assert all(torch.equal(p, base[n]) for n, p in policy.module.named_parameters())
    synced.load_weights(zero)
    assert_same(synced.generate(prompts_P, PARAMS, SEEDS), probe_before)


def test_a_completion_depends_only_on_prompt_and_seed(synced, prompts_P):
    assert synced.generate([], PARAMS, []) == []
    assert_seeded(synced, prompts_P, PARAMS)


def test_a_completion_ends_with_its_stop_token_or_at_the_limit(synced, policy, prompts_P):
    assert_ended(synced, prompts_P[0], policy.stop_token_ids)


def test_banned_tokens_are_never_drawn(synced, policy, prompts_P):
    hot = sampling(2.0, num_completions=64)
    groups = synced.generate(prompts_P, hot, [1000, 2000, 3000])
    drawn = {token for group in groups for c in group for token in c.token_ids}
    assert len(drawn) > 250, "hot enough to reach most of the vocabulary"
    assert not drawn & set(policy.banned_token_ids)


def test_greedy_equals_the_transformers_engine(synced, policy, prompts_P):
    greedy = sampling(0.0, num_completions=2)
    engines = synced, plain_engine(policy)
    assert_same(*(each.generate(prompts_P, greedy, [0, 0, 0]) for each in engines))


@pytest.mark.parametrize(("top_p", "top_k"), [(0.8, -1), (1.0, 5), (0.9, 20)])
def test_top_k_and_top_p_equal_the_transformers_engine(synced, policy, prompts_P, top_p, top_k):
    """First tokens of 64 completions: the same support, the same renormalised log-probs."""
    plain = plain_engine(policy)
    cut = sampling(0.7, top_p, top_k, max_tokens=1, num_completions=64)
    for prompt, group in zip(prompts_P, synced.generate(prompts_P, cut, [1, 2, 3]), strict=True):
        expected_V = plain._distribution(policy.decoder([prompt], 1).step(None), cut)[0]
        for completion in group:
            assert abs(expected_V[completion.token_ids[0]] - completion.logprobs[0]) < 1e-4


def test_prompts_of_several_pictures_are_sampled_too(synced, policy, monkeypatch):
    """Three pictures, two of them in another order, and one."""
    several = replace(tiny_qwen.TEMPLATE, picture="Picture {number}: {image}", max_pictures=3)
    monkeypatch.setattr(policy.prompts, "template", several)
    pictures = [tiny_qwen.picture(200 + i, width=64 + 32 * i) for i in range(3)]
    sources_P = [pictures, pictures[1::-1], pictures[:1]]
    prompts_P = [
        policy.build_prompt(replace(tiny_qwen.sample(i), sources=tuple(sources)))
        for i, sources in enumerate(sources_P)
    ]
    assert [len(prompt.images) for prompt in prompts_P] == [3, 2, 1]
    completions_PG = synced.generate(prompts_P, PARAMS, SEEDS)
    assert max_dlogp(policy, prompts_P, completions_PG) <= FORWARD_TOL
    monkeypatch.setattr(policy.prompts, "template", replace(several, picture="{image}"))
    unnumbered = [policy.build_prompt(prompt.sample) for prompt in prompts_P]
    assert max_dlogp(policy, unnumbered, completions_PG) > 1e-2, "the check can fail"


@pytest.mark.parametrize(
    ("residency", "has_room", "device", "sleeps"),
    [
        ("auto", True, "cuda:0", False),
        ("auto", False, "cuda:0", True),
        ("resident", False, "cuda:0", False),
        ("sleep", True, "cuda:0", True),
        ("sleep", False, "cpu", False),
    ],
)
def test_residency_decides_which_engine_sleeps(
    engine, policy, monkeypatch, residency, has_room, device, sleeps
):
    monkeypatch.setattr(vllm_engine.VllmEngine, "_start", lambda *_: engine._llm)
    config = vllm_engine.Config(type="vllm", residency=residency)
    setup = EngineSetup(policy, device, has_room=has_room)
    assert vllm_engine.VllmEngine(config, setup)._sleeps == sleeps


@pytest.mark.parametrize(("sleeps", "calls"), [(False, []), (True, [("sleep", 1), ("wake", None)])])
def test_an_engine_that_stays_is_neither_put_to_sleep_nor_woken(synced, monkeypatch, sleeps, calls):
    """vLLM's sleep is replaced, because it needs a GPU."""
    observed = []
    monkeypatch.setattr(synced, "_sleeps", sleeps)
    monkeypatch.setattr("vllm.LLM.sleep", lambda _, level: observed.append(("sleep", level)))
    monkeypatch.setattr("vllm.LLM.wake_up", lambda _: observed.append(("wake", None)))
    synced.sleep()
    synced.wake()
    assert observed == calls


def test_a_batch_may_exceed_one_scheduler_step(synced, policy):
    """130 prompts of 85 tokens are more than the scheduler takes in one step."""
    prompts = [policy.build_prompt(tiny_qwen.sample(i)) for i in range(130)]
    few = sampling(max_tokens=2, num_completions=1)
    assert sum(len(prompt.token_ids) for prompt in prompts) > 8192
    completions = synced.generate(prompts, few, list(range(130)))
    [[alone]] = synced.generate(prompts[77:78], few, [77])
    assert completions[77][0].token_ids == alone.token_ids


def test_vllm_loads_a_saved_adapter(engine, policy, worker, prompts_P, tmp_path, monkeypatch):
    """vLLM's own loader gives the same completions from the folder as a sync from the tensors."""
    from vllm.lora.request import LoRARequest

    expected = engine.generate(prompts_P[:1], PARAMS, [11])
    policy.save_pretrained(str(tmp_path), trainable(policy))
    worker.model_runner.lora_manager.remove_all_adapters()
    saved = LoRARequest("saved", 2, str(tmp_path))
    monkeypatch.setattr("vllm.lora.request.LoRARequest", lambda *_: saved)
    assert_same(engine.generate(prompts_P[:1], PARAMS, [11]), expected)
    worker.remove_lora(2)


def doubled(weights):
    return replace(weights, tensors={name: 2 * tensor for name, tensor in weights.tensors.items()})


def at_another_scale(weights):
    """Refused even before the first step, when B is zero and no probe could detect it."""
    return replace(weights, lora_config={**weights.lora_config, "lora_alpha": 1.1 * LORA["alpha"]})


@pytest.mark.parametrize(
    ("change", "message"), [(doubled, "fingerprint"), (at_another_scale, r"policy\.lora\.alpha")]
)
def test_other_weights_than_the_trainers_adapter_are_refused(synced, policy, change, message):
    with pytest.raises((RuntimeError, ValueError), match=message):
        synced.load_weights(change(export(policy)))


def test_the_start_leaves_cudnn_attention_enabled():
    with vllm_engine.untouched_globals():
        torch.backends.cuda.enable_cudnn_sdp(False)  # as vllm/platforms/cuda.py
    assert torch.backends.cuda.cudnn_sdp_enabled()
