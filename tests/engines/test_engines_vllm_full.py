"""vLLM under full fine-tuning, on the base of an editor's text encoder (tied embeddings)."""

import re
from dataclasses import replace

import pytest
import tiny_qwen
import torch
from tiny_engines import assert_follows, export, sampling, started
from tiny_policy import make, step_in_bfloat16, trainable

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    editor = tmp_path_factory.mktemp("editor")
    text_encoder = tiny_qwen.make_model(tiny_qwen.make_tokenizer(), seed=7, tied=True)
    text_encoder.save_pretrained(editor / "text_encoder")
    template = replace(tiny_qwen.TEMPLATE, max_pictures=2)
    from_editor = {"init_text_encoder_from": str(editor), "template": template, "lora": None}
    return make(**from_editor, temperature=1.0, max_prompt_tokens=128)


@pytest.fixture(scope="module")
def engine(policy):
    was_initialized = torch.distributed.is_initialized()
    if not was_initialized:  # as DeepSpeed makes it for one process
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    group = torch.distributed.GroupMember.WORLD
    with started(policy, sharded=True) as engine:
        yield engine
    assert torch.distributed.GroupMember.WORLD is group is not None, "the engine did not replace it"
    if not was_initialized:
        torch.distributed.destroy_process_group()


def test_full_weights_arrive_after_every_update(engine, policy):
    """The frozen tower is not sent; the tied head is, because vLLM keeps its own copy. With sharded
    weights the engine encodes the pictures itself: here two of one prompt and one of the other."""
    samples = [tiny_qwen.sample(i, width=64 * (i + 1)) for i in range(2)]
    both = replace(samples[0], sources=samples[0].sources + samples[1].sources)
    prompts_P = [policy.build_prompt(sample) for sample in (both, samples[1])]
    assert_follows(engine, policy, prompts_P, sampling())


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
    engine.load_weights(export(policy))
    call = engine._llm.collective_rpc

    def faulty(method, args=(), kwargs=None):
        if method == "reload_weights":
            kwargs = {"weights_iterator": iter(fault(list(kwargs["weights_iterator"])))}
        return call(method, args=args, kwargs=kwargs)

    monkeypatch.setattr(engine._llm, "collective_rpc", faulty)
    with torch.no_grad():
        for parameter in trainable(policy).values():
            parameter += STEP
    engine.load_weights(export(policy, 1))
    assert message in engine.held_fingerprint()


def test_a_weight_in_an_unknown_place_gives_no_fingerprint(engine, policy, monkeypatch):
    """A user's own model may fuse weights that no table of vLLM's lists."""
    weights = export(policy)
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
    engine.load_weights(export(policy))
    kept = {}

    def lose(worker):
        [(name, tower), *_] = worker.model_runner.get_model().visual.named_parameters()
        kept[name] = tower.data.clone()
        tower.data.zero_()

    def put_back(worker):
        for name, tower in worker.model_runner.get_model().visual.named_parameters():
            tower.data.copy_(kept.get(name, tower))

    monkeypatch.setattr(engine, "_sleeps", True)
    monkeypatch.setattr("vllm.LLM.sleep", lambda _, level: None)
    monkeypatch.setattr("vllm.LLM.wake_up", lambda _: None)
    engine.sleep()
    engine.wake()
    engine.sleep()
    engine._llm.collective_rpc(lose)
    with pytest.raises(RuntimeError, match="woke up with other weights in 1 parameters: visual"):
        engine.wake()
    engine._llm.collective_rpc(put_back)


def test_a_tensor_lost_in_bfloat16_is_detected_at_earls_learning_rate():
    policy = make("emu3", dtype="bfloat16")
    with started(policy) as engine:
        engine.load_weights(export(policy))
        before = {name: tensor.clone() for name, tensor in export(policy).tensors.items()}
        step_in_bfloat16(policy, STEP)
        weights = export(policy, 1)
        moved = [name for name, tensor in weights.tensors.items() if (tensor != before[name]).any()]
        assert len(moved) > 10
        for lost in moved:
            engine.load_weights(weights)
            assert engine.held_fingerprint() == weights.fingerprint
            stale = iter({**weights.tensors, lost: before[lost]}.items())
            engine._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": stale})
            assert engine.held_fingerprint() == f"other weights in 1 tensors: {lost}"
