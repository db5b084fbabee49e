"""vLLM under full fine-tuning, on the base of an editor's text encoder (tied embeddings)."""

import re
from dataclasses import replace

import pytest
import tiny_emu3
import tiny_qwen
import torch
import vllm
from tiny_engines import max_dlogp
from tiny_policy import make_emu3, step_in_bfloat16, trainable
from tiny_rounding import FORWARD_TOL

from rl.api.engine import EngineSetup
from rl.api.policy import PolicySetup
from rl.api.types import SamplingParams
from rl.engines import vllm as vllm_engine
from rl.policies.qwen_vl import Qwen25VL

pytestmark = pytest.mark.slow

TEMPLATE = replace(tiny_qwen.TEMPLATE, max_pictures=2)
PARAMS = SamplingParams(1.0, top_p=1.0, top_k=-1, max_tokens=12, num_completions=4)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    folder = tiny_qwen.save_policy_folder(tmp_path_factory.mktemp("policy"))
    editor = tmp_path_factory.mktemp("editor")
    text_encoder = tiny_qwen.make_model(tiny_qwen.make_tokenizer(), seed=7, tied=True)
    text_encoder.save_pretrained(editor / "text_encoder")
    config = Qwen25VL.Config(
        type="",
        model_path=folder,
        init_text_encoder_from=str(editor),
        dtype="float32",
        lora=None,
        max_prompt_tokens=128,
    )
    return Qwen25VL(
        config, PolicySetup("hidden_states", template=TEMPLATE, max_completion_tokens=12)
    )


@pytest.fixture(scope="module")
def engine(policy):
    was_initialized = torch.distributed.is_initialized()
    if not was_initialized:  # as DeepSpeed makes it for one process
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    group = torch.distributed.GroupMember.WORLD
    config = vllm_engine.Config(type="vllm", max_num_seqs=16)
    engine = vllm_engine.VllmEngine(config, EngineSetup(policy, "cpu", sharded=True))
    yield engine
    engine.close()
    assert torch.distributed.GroupMember.WORLD is group is not None, "the engine did not replace it"
    if not was_initialized:
        torch.distributed.destroy_process_group()


def test_full_weights_arrive_after_every_update(engine, policy):
    """The frozen tower is not sent; the tied head is, because vLLM keeps its own copy. With sharded
    weights the engine encodes the pictures itself: here two of one prompt and one of the other."""
    samples = [tiny_qwen.sample(i, width=64 * (i + 1)) for i in range(2)]
    both = replace(samples[0], sources=samples[0].sources + samples[1].sources)
    prompts_P = [policy.build_prompt(sample) for sample in (both, samples[1])]
    optimizer = torch.optim.AdamW(trainable(policy).values(), lr=1e-3)

    for iteration in range(3):
        completions_PG = engine.generate(prompts_P, PARAMS, [10 * iteration, 1000])
        assert max_dlogp(policy, prompts_P, completions_PG) <= FORWARD_TOL
        rows = [(prompts_P[0], completion.token_ids) for completion in completions_PG[0]]
        policy.module(policy.collate(rows)).logprobs.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert max_dlogp(policy, prompts_P, completions_PG) > 1e-2, "the check can fail"
        weights = policy.export_weights(trainable(policy), iteration)
        assert engine.held_fingerprint() != weights.fingerprint
        engine.load_weights(weights)
        assert engine.held_fingerprint() == weights.fingerprint


def nothing(sent):
    return []


def all_but_one(sent):
    return [(name, tensor) for name, tensor in sent if name != TENSOR]


def swapped_layers(sent):
    numbers = {".layers.0.": ".layers.1.", ".layers.1.": ".layers.0."}
    number = re.compile("|".join(map(re.escape, numbers)))
    return [(number.sub(lambda m: numbers[m[0]], name), tensor) for name, tensor in sent]


def half_of_one(sent):
    tensors = dict(sent)
    half = tensors[TENSOR].clone()
    half[: len(half) // 2] -= STEP
    return [*(tensors | {TENSOR: half}).items()]


TENSOR = "model.language_model.layers.1.self_attn.v_proj.weight"
"""The last slice of a fused matrix."""
STEP = 3e-6
"""EARL's learning rate."""


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (nothing, " tensors: model.language_model.embed_tokens.weight, "),
        (all_but_one, TENSOR),
        (swapped_layers, "model.language_model.layers.0.self_attn.q_proj.weight"),
        (half_of_one, f"other weights in 1 tensors: {TENSOR}"),
    ],
)
def test_a_load_that_is_incomplete_is_detected(engine, policy, monkeypatch, fault, message):
    """After one step of 3e-6, vLLM gets other weights than the trainer sent."""
    engine.load_weights(policy.export_weights(trainable(policy), 0))
    call = engine._llm.collective_rpc

    def faulty(method, args=(), kwargs=None):
        if method == "reload_weights":
            kwargs = {"weights_iterator": iter(fault(list(kwargs["weights_iterator"])))}
        return call(method, args=args, kwargs=kwargs)

    monkeypatch.setattr(engine._llm, "collective_rpc", faulty)
    with torch.no_grad():
        for parameter in trainable(policy).values():
            parameter += STEP
    engine.load_weights(policy.export_weights(trainable(policy), 1))
    assert message in engine.held_fingerprint()


def test_a_weight_in_an_unknown_place_gives_no_fingerprint(engine, policy, monkeypatch):
    """A user's own model may fuse weights that no table of vLLM's lists."""
    weights = policy.export_weights(trainable(policy), 0)
    engine.load_weights(weights)
    tensors = {**weights.tensors, "model.language_model.secret.weight": torch.ones(2)}
    call = engine._llm.collective_rpc

    def without_reload(method, args=(), kwargs=None):
        return [None] if method == "reload_weights" else call(method, args=args, kwargs=kwargs)

    monkeypatch.setattr(engine._llm, "collective_rpc", without_reload)
    engine.load_weights(replace(weights, tensors=tensors))
    assert engine.held_fingerprint() is None


def test_weights_lost_in_sleep_are_detected_on_waking(engine, policy, monkeypatch):
    """Also those of the frozen tower, which no sync sends. vLLM's sleep, for GPUs, is replaced."""
    weights = policy.export_weights(trainable(policy), 0)
    engine.load_weights(weights)
    kept = {}

    def lose(worker):
        [(name, tower), *_] = worker.model_runner.get_model().visual.named_parameters()
        kept[name] = tower.data.clone()
        tower.data.zero_()

    def put_back(worker):
        for name, tower in worker.model_runner.get_model().visual.named_parameters():
            tower.data.copy_(kept.get(name, tower))

    monkeypatch.setattr(engine, "_sleeps", True)
    monkeypatch.setattr(vllm.LLM, "sleep", lambda _, level: None)
    monkeypatch.setattr(vllm.LLM, "wake_up", lambda _: None)
    engine.sleep()
    engine.wake()
    engine.sleep()
    engine._llm.collective_rpc(lose)
    with pytest.raises(RuntimeError, match="woke up with other weights in 1 parameters: visual"):
        engine.wake()
    engine._llm.collective_rpc(put_back)


def test_a_tensor_lost_in_bfloat16_is_detected_at_earls_learning_rate(tmp_path):
    policy = make_emu3(tiny_emu3.save_policy_folder(tmp_path), dtype="bfloat16")
    config = vllm_engine.Config(type="vllm", max_num_seqs=16)
    engine = vllm_engine.VllmEngine(config, EngineSetup(policy, "cpu"))
    weights = policy.export_weights(trainable(policy), 0)
    engine.load_weights(weights)
    assert engine.held_fingerprint() == weights.fingerprint
    before = {name: tensor.clone() for name, tensor in weights.tensors.items()}
    step_in_bfloat16(policy, STEP)
    weights = policy.export_weights(trainable(policy), 1)
    moved = [name for name, tensor in weights.tensors.items() if (tensor != before[name]).any()]
    assert len(moved) > 10
    for lost in moved:
        engine.load_weights(weights)
        assert engine.held_fingerprint() == weights.fingerprint
        engine._llm.collective_rpc(
            "reload_weights",
            kwargs={"weights_iterator": iter({**weights.tensors, lost: before[lost]}.items())},
        )
        assert engine.held_fingerprint() == f"other weights in 1 tensors: {lost}"
    engine.close()
