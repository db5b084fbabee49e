"""The memory plan against figures worked out by hand."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import tiny_qwen
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rl.api.policy import PolicySetup
from rl.meter.flops import Recompute
from rl.policies.qwen2_5_vl import plug as qwen2_5_vl
from rl.preflight.engine_memory import InferenceEngine
from rl.preflight.memory_plan import (
    CONTEXT_GB,
    KNOWN,
    LOGITS_GB,
    PHASES,
    FrozenModel,
    Plan,
    PolicyModel,
    Sizes,
    plan,
    residency,
    residency_line,
)

MODEL = PolicyModel(2, 10, 40, 5, 1, 2, params=3e9)
EDITOR = FrozenModel("renderer", "auto", 2, {"transformer": 20e9}, {"transformer": 1e9})
ENGINE = InferenceEngine(
    share=0.5,
    cache_gb=None,
    weights_gb=6,
    kv_bytes=16,
    step_bytes=240,
    longest_tokens=100,
    max_num_seqs=8,
    residency="sleep",
)
SIZES = Sizes(
    model=MODEL,
    bytes_per_weight=2,
    lora_rank=4,
    lora_modules=("q_proj", "v_proj"),
    zero_stage=0,
    world_size=4,
    forward_tokens=200,
    kept_tokens=700,
    all_kept=True,
    prompt_tokens=70,
    completion_tokens=30,
    num_completions=3,
    checkpointing=False,
    engine=ENGINE,
    reads_reference=False,
    frozen=(EDITOR,),
)


def gb(planned: Plan, part: str) -> float:
    return next(row.gb for row in planned.rows if row.part == part)


def test_lora_parameters() -> None:
    # q: 10 -> 10, v: 10 -> 2, rank 4: 4 (10 + 10) + 4 (10 + 2) = 128 a layer, 2 layers.
    assert MODEL.lora_params(4, ("q_proj", "v_proj")) == 256
    # The 7B, rank 32 on q, k, v, o: 28 layers x 32 x (7168 + 4096 + 4096 + 7168).
    seven = KNOWN["Qwen/Qwen2.5-VL-7B-Instruct"]
    assert seven.lora_params(32, ("q_proj", "k_proj", "v_proj", "o_proj")) == 20_185_088


def test_activations() -> None:
    # A bfloat16 layer: norms 2 x 10; q, k, v and result 2 x 10 + 2 x 2; what q and v read 10: 54.
    # Its MLP: 3 x 40. Two bytes each, two layers.
    adapted = ("q_proj", "v_proj")
    assert MODEL.kept_bytes(adapted, 2, False) == 2 * (108 + 240)
    assert MODEL.kept_bytes(adapted, 2, "mlp") == 2 * (108 + 10 * 2)
    assert MODEL.kept_bytes(adapted, 2, True) == 2 * 10 * 2
    # One layer at work: the gradients of its MLP's inside, and what is recomputed.
    assert MODEL.working_bytes(adapted, 2, False) == 240
    assert MODEL.working_bytes(adapted, 2, "mlp") == 240 + 240
    assert MODEL.working_bytes(adapted, 2, True) == 108 + 240 + 240
    # The result is what o reads. All weights trained: the MLP's input and product besides.
    assert MODEL.kept_bytes(("o_proj",), 2, False) == 2 * (88 + 240)
    assert MODEL.kept_bytes(None, 2, False) == 2 * (108 + 240 + 20 + 80)
    assert MODEL.kept_bytes(None, 2, "mlp") == 2 * (108 + 20)


class LiveBytes(TorchDispatchMode):
    """Counts the memory that outlives the operations that made it."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        inputs = {leaf.untyped_storage()._cdata for leaf in _tensors((args, kwargs))}
        result = operation(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in inputs:
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    def total(self) -> int:
        gc.collect()
        return sum(size for made, size in self._made.values() if not made.expired())


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_qwen.save_policy_folder(tmp_path_factory.mktemp("policy"))


@contextmanager
def one_layer_less(policy: Any) -> Iterator[None]:
    """What is gone with it is a layer's share, and nothing of what surrounds the layers."""
    decoder = policy.module.base_model.model.language_model
    layers, depth = decoder.layers, decoder.config.num_hidden_layers
    decoder.layers, decoder.config.num_hidden_layers = layers[:-1], depth - 1
    yield
    decoder.layers, decoder.config.num_hidden_layers = layers, depth


@pytest.mark.parametrize(
    ("adapted", "dtype", "checkpointing"),
    [
        (None, "bfloat16", False),
        (None, "bfloat16", "mlp"),
        (("q_proj", "o_proj"), "bfloat16", "mlp"),
        (("q_proj", "k_proj", "v_proj", "o_proj"), "bfloat16", False),
        (("q_proj", "o_proj", "up_proj", "down_proj"), "bfloat16", False),
        (("q_proj",), "bfloat16", True),
        (("q_proj", "v_proj"), "float32", False),
    ],
)
def test_what_a_real_forward_keeps(
    folder: str, adapted: tuple[str, ...] | None, dtype: str, checkpointing: Recompute
) -> None:
    """A policy's own packed forward, its graph alive: the plan counts what is there."""
    lora = None if adapted is None else {"r": 1, "alpha": 1, "target_modules": adapted}
    section = {"type": "", "model_path": folder, "dtype": dtype, "device": "cpu", "lora": lora}
    policy = qwen2_5_vl.Qwen25VL(
        qwen2_5_vl.Config.model_validate(section),
        PolicySetup(
            "text",
            template=tiny_qwen.TEMPLATE,
            max_completion_tokens=12,
            gradient_checkpointing=checkpointing,
        ),
    )
    policy.module.train()
    prompt = policy.build_prompt(tiny_qwen.sample(0))
    batch = policy.collate([(prompt, list(range(10, 40)))] * 2)
    with torch.no_grad():
        policy.module(batch)  # the picture's features stay from here on

    def kept() -> int:
        with LiveBytes() as live:
            outputs = policy.module(batch)
        assert outputs.logprobs.requires_grad
        return live.total()

    whole = kept()
    with one_layer_less(policy):
        per_token = (whole - kept()) / len(batch.input_ids)
    tiny = PolicyModel(1, 64, 128, 2, 1, 32, params=0)
    # Left out of the plan: log-sum-exps, a norm's root, an adapter's inner values.
    num_bytes = getattr(torch, dtype).itemsize
    assert per_token == pytest.approx(tiny.kept_bytes(adapted, num_bytes, checkpointing), rel=0.05)


def test_phases() -> None:
    planned = plan(SIZES, gpu_gb=100)
    lora = 256
    resident = CONTEXT_GB + 3 * 2 + lora * 12e-9 + 20 * 2
    # From the first conditioning on: all of an iteration's graphs, one forward's working memory.
    forwards = 700 * 696e-9 + 200 * 240e-9 + LOGITS_GB + lora * 4e-9
    assert planned.total_gb("generate") == pytest.approx(resident + 50)
    assert planned.total_gb("render") == pytest.approx(resident + 2 + forwards)
    assert planned.total_gb("learn") == pytest.approx(resident + forwards)
    assert planned.peak_gb == planned.total_gb("generate")
    # What is not kept is forwarded again, one row at a time.
    some = plan(replace(SIZES, kept_tokens=0, all_kept=False), gpu_gb=100)
    assert planned.total_gb("render") - some.total_gb("render") == pytest.approx(700 * 696e-9)
    assert some.total_gb("learn") - some.total_gb("reference") == pytest.approx(200 * 696e-9)


def test_the_engine_stays_where_everything_fits_with_a_tenth_to_spare() -> None:
    """Half of the GPU is the engine's; renderer and learner want about 51 GB besides."""
    others = plan(SIZES, gpu_gb=1000).total_gb("render")
    assert 50 < others < 52
    auto = replace(SIZES, engine=replace(ENGINE, residency="auto"))
    for gpu_gb, expected in ((130, "resident"), (124, "sleep")):
        planned = plan(auto, gpu_gb)
        together = others + gpu_gb / 2
        assert (
            residency(planned, gpu_gb)
            == expected
            == ("resident" if together <= 0.9 * gpu_gb else "sleep")
        )
        assert planned.engine is not None
        assert (planned.engine.phases == PHASES) == (expected == "resident")
        assert f"{together:.1f} GB of {gpu_gb}" in residency_line(planned, gpu_gb)
        # Stated in the config, it is done, and residency still says what there is room for.
        for stated in ("resident", "sleep"):
            as_stated = plan(replace(SIZES, engine=replace(ENGINE, residency=stated)), gpu_gb)
            assert (as_stated.total_gb("render") > others + 1) == (stated == "resident")
            assert residency(as_stated, gpu_gb) == expected
    alone = plan(replace(SIZES, engine=None), gpu_gb=100)
    assert alone.engine is None and residency(alone, 100) == "resident"


def test_zero_stages_under_full_fine_tuning() -> None:
    full = replace(SIZES, lora_rank=None)
    by_stage = [plan(replace(full, zero_stage=stage), gpu_gb=100) for stage in range(4)]
    # 3e9 parameters: bfloat16 weights 6 GB; masters and moments 36 GB; float32 gradients 12 GB.
    assert [gb(p, "policy weights") for p in by_stage] == pytest.approx([6, 6, 6, 1.5])
    assert [gb(p, "optimiser state") for p in by_stage] == pytest.approx([36, 9, 9, 9])
    assert [gb(p, "gradients") for p in by_stage] == pytest.approx([12, 12, 3, 3])
    # From stage 2 on ranks run their backwards together, after the last verdict.
    early = [p.total_gb("render") - by_stage[0].total_gb("render") for p in by_stage[:3]]
    assert early == pytest.approx([0, -27, -27 - 12])
    reference = plan(replace(full, reads_reference=True), gpu_gb=100)
    # Beside the trained weights, and gone before the first backward.
    assert reference.total_gb("learn") == by_stage[0].total_gb("learn")
    assert reference.total_gb("reference") == pytest.approx(by_stage[0].total_gb("reference") + 6)


def test_models_on_other_devices_are_named_but_not_counted() -> None:
    clip = FrozenModel("rewards.clip", "cuda:2", 4, {"model": 0.15e9}, {})
    planned = plan(replace(SIZES, frozen=(replace(EDITOR, device="cuda:1"), clip)), gpu_gb=100)
    assert planned.total_gb("render") == pytest.approx(plan(SIZES, 100).total_gb("render") - 42)
    assert "renderer lies on cuda:1: 40.00 GB of weights there, 2.00 while it works" in (
        planned.assumptions
    )
    assert any(
        text.startswith("rewards.clip lies on cuda:2: 0.60 GB") for text in planned.assumptions
    )


def test_the_engine_cache() -> None:
    # A token takes 2 layers x 2 x 2 values x 2 bytes = 16 B. Share 8.5 GB - 6 - 1.5 = 1 GB, less a
    # step of 8 x 100 tokens of 250 B.
    planned = plan(replace(SIZES, engine=replace(ENGINE, step_bytes=250)), gpu_gb=17)
    assert any("holds 62487500 tokens, 8 full-length" in text for text in planned.assumptions)
    small = plan(SIZES, gpu_gb=14)
    assert any("leaves no room for one completion" in text for text in small.assumptions)
    shared = plan(replace(SIZES, engine=None), gpu_gb=17)
    assert gb(shared, "key-value cache") == pytest.approx(300 * 16e-9)


def test_the_least_a_sampler_starts_with() -> None:
    many = replace(ENGINE, max_num_seqs=10**6, longest_tokens=65)
    # Weights, 1.5 GB, a step of 16384 tokens of 240 B (half on a small GPU), 96 tokens in 3 blocks.
    least_gb = 6 + 1.5 + 16384 * 240e-9 + 96 * 16e-9
    assert many.least_gb(80) == pytest.approx(least_gb, rel=1e-12)
    assert many.least_gb(24) == pytest.approx(least_gb - 8192 * 240e-9, rel=1e-12)
    assert replace(many, share=0.09).starves(80) and not replace(many, share=0.10).starves(80)
    # A stated cache takes the place of the share.
    stated = replace(many, share=0.01, cache_gb=1.0)
    assert stated.claimed_gb(80) == pytest.approx(6 + 1.5 + 16384 * 240e-9 + 1)
    assert not stated.starves(80) and replace(stated, cache_gb=95 * 16e-9).starves(80)
