"""The memory plan against numbers computed by hand."""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from typing import Any

import pytest
import tiny_policy
import tiny_qwen
import torch
from tiny_config import shipped
from tiny_messages import holds
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rl import build
from rl.check.memory_plan import (
    CONTEXT_GB,
    KNOWN,
    LOGITS_GB,
    PHASES,
    InferenceEngine,
    Item,
    Plan,
    PolicyModel,
    Sizes,
    engine_claim,
    engine_line,
    host_plan,
    host_problems,
    judge_share,
    plan,
    plan_of,
    residency_line,
    unknowns,
)
from rl.check.this_machine import host_memory_gb
from rl.meter import Recompute

MODEL = PolicyModel(2, 10, 40, 5, 1, 2, params=3e9)
ENGINE = InferenceEngine(
    share=0.5,
    own_gb=1.5,
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
    longest_tokens=100,
    num_completions=3,
    checkpointing=False,
    engine=ENGINE,
    reads_reference=False,
    frozen=(Item("renderer transformer", 40, PHASES), Item("renderer, workspace", 2, ("render",))),
)


def planned_on(gpu_gb: float, **changes: Any) -> Plan:
    return plan(replace(SIZES, **changes), gpu_gb)


def gb(planned: Plan, part: str) -> float:
    return next(item.gb for item in planned.items if item.part == part)


def test_lora_parameters_by_hand() -> None:
    # q: 10 -> 10, v: 10 -> 2, rank 4: 4 (10 + 10) + 4 (10 + 2) = 128 a layer, 2 layers.
    assert MODEL.lora_params(4, ("q_proj", "v_proj")) == 256
    # The 7B, rank 32 on q, k, v, o: 28 layers x 32 x (7168 + 4096 + 4096 + 7168).
    seven = KNOWN["Qwen/Qwen2.5-VL-7B-Instruct"]
    assert seven.lora_params(32, ("q_proj", "k_proj", "v_proj", "o_proj")) == 20_185_088


def test_activation_bytes_by_hand() -> None:
    # A bfloat16 layer: norms 2 x 10; q, k, v and result 2 x 10 + 2 x 2; the input of q, v 10: 54.
    # Its MLP: 3 x 40. Two bytes each, two layers.
    adapted = ("q_proj", "v_proj")
    assert MODEL.kept_bytes(adapted, 2, False) == 2 * (108 + 240)
    assert MODEL.kept_bytes(adapted, 2, "mlp") == 2 * (108 + 10 * 2)
    assert MODEL.kept_bytes(adapted, 2, True) == 2 * 10 * 2
    # Working memory of one layer: gradients inside its MLP, and recomputed activations.
    assert MODEL.working_bytes(adapted, 2, False) == 240
    assert MODEL.working_bytes(adapted, 2, "mlp") == 240 + 240
    assert MODEL.working_bytes(adapted, 2, True) == 108 + 240 + 240
    # The result is o's input. With all weights trained, also the MLP's input and product.
    assert MODEL.kept_bytes(("o_proj",), 2, False) == 2 * (88 + 240)
    assert MODEL.kept_bytes(None, 2, False) == 2 * (108 + 240 + 20 + 80)
    assert MODEL.kept_bytes(None, 2, "mlp") == 2 * (108 + 20)


class LiveBytes(TorchDispatchMode):
    """Counts the memory that outlives the operations that made it."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        inputs = {storage._cdata for storage in _storages((args, kwargs))}
        result = operation(*args, **(kwargs or {}))
        for storage in _storages(result):
            if storage._cdata not in inputs:
                self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    def total(self) -> int:
        gc.collect()
        return sum(size for storage, size in self._storages.values() if not storage.expired())


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    leaves = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))
    return [leaf.untyped_storage() for leaf in leaves]


TINY = PolicyModel(1, 64, 128, 2, 1, 32, params=0)
"""One layer of `tiny_qwen`'s."""
TINY3 = PolicyModel(1, 64, 128, 3, 1, 32, params=0, head_norms=True)
"""One layer of `tiny_qwen3`'s, which also keeps the inputs of its head norms."""
ALL = ("q_proj", "k_proj", "v_proj", "o_proj")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "adapted", "dtype", "checkpointing"),
    [
        (TINY, None, "bfloat16", False),
        (TINY, None, "bfloat16", "mlp"),
        (TINY, ("q_proj", "o_proj"), "bfloat16", "mlp"),
        (TINY, ALL, "bfloat16", False),
        (TINY, ("q_proj", "o_proj", "up_proj", "down_proj"), "bfloat16", False),
        (TINY, ("q_proj",), "bfloat16", True),
        (TINY, ("q_proj", "v_proj"), "float32", False),
        (TINY3, None, "bfloat16", False),
        (TINY3, ALL, "bfloat16", False),
        (TINY3, ("q_proj", "o_proj"), "bfloat16", "mlp"),
        (TINY3, ("q_proj",), "bfloat16", True),
    ],
)
def test_a_real_forward_keeps_the_planned_bytes(
    model: PolicyModel, adapted: tuple[str, ...] | None, dtype: str, checkpointing: Recompute
) -> None:
    """Measured after the packed forward of a policy, while its graph is alive: the bytes that one
    layer keeps for each token. The plan leaves out log-sum-exps, a norm's root and an adapter's
    inner values."""
    lora = None if adapted is None else {"r": 1, "alpha": 1, "target_modules": adapted}
    policy = tiny_policy.make(
        "qwen3_vl" if model is TINY3 else "qwen2_5_vl",
        kind="text",
        template=tiny_qwen.TEMPLATE,
        dtype=dtype,
        lora=lora,
        gradient_checkpointing=checkpointing,
    )
    policy.module.train()
    prompt = policy.build_prompt(tiny_qwen.sample(0))
    batch = policy.collate([(prompt, list(range(10, 40)))] * 2)
    with torch.no_grad():
        policy.module(batch)  # caches the picture's features
    decoder = policy.module.base_model.model.language_model
    kept = []
    for num_removed in (0, 1):  # the difference is what one layer keeps
        decoder.layers = decoder.layers[: len(decoder.layers) - num_removed]
        decoder.config.num_hidden_layers = len(decoder.layers)
        with LiveBytes() as live:
            outputs = policy.module(batch)
        assert outputs.logprobs.requires_grad
        kept.append(live.total())
    planned = model.kept_bytes(adapted, getattr(torch, dtype).itemsize, checkpointing)
    per_token = (kept[0] - kept[1]) / len(batch.input_ids)
    assert per_token == pytest.approx(planned, rel=0.05)


def test_memory_of_each_phase_by_hand() -> None:
    planned = planned_on(100)
    lora = 256
    resident = CONTEXT_GB + 3 * 2 + lora * 12e-9 + 20 * 2
    asleep = 1.5  # what a sleeping engine keeps of its half
    # From the first conditioning on: all of an iteration's graphs; one forward's working memory.
    kept, working = 700 * 696e-9, 200 * 240e-9 + LOGITS_GB
    assert planned.total_gb("generate") == pytest.approx(resident + 50)
    assert planned.total_gb("condition") == pytest.approx(resident + asleep + kept + working)
    assert planned.total_gb("render") == pytest.approx(resident + asleep + 2 + kept)
    learn = resident + asleep + kept + working + lora * 4e-9
    assert planned.total_gb("learn") == pytest.approx(learn)
    assert planned.peak_gb == planned.total_gb("generate")
    # What is not kept is forwarded again, one row at a time.
    some = planned_on(100, kept_tokens=0, all_kept=False)
    assert planned.total_gb("render") - some.total_gb("render") == pytest.approx(700 * 696e-9)
    assert some.total_gb("learn") - some.total_gb("reference") == pytest.approx(200 * 696e-9)


def test_the_engine_stays_if_everything_fits_nine_tenths_of_the_gpu() -> None:
    """The engine takes half of the GPU, or 1.5 GB asleep; renderer and learner need about 51 GB."""
    others = planned_on(1000).total_gb("render")
    assert 51 < others < 52

    def planned(gpu_gb: float, residency: str) -> tuple[Plan, bool]:
        of_it = planned_on(gpu_gb, engine=replace(ENGINE, residency=residency))
        return of_it, of_it.total_gb("render") > others + 1

    for gpu_gb, stays in ((130, True), (124, False)):
        auto, is_large = planned(gpu_gb, "auto")
        together = others + gpu_gb / 2 - ENGINE.own_gb
        assert auto.engine_stays == stays == (together <= 0.9 * gpu_gb) == is_large
        assert f"{together:.1f} of {gpu_gb} GB" in residency_line(auto, gpu_gb)
        # A stated residency is planned as stated.
        for stated in ("resident", "sleep"):
            as_stated, is_large = planned(gpu_gb, stated)
            assert is_large == (stated == "resident")
            assert "as engine.residency says" in residency_line(as_stated, gpu_gb)
    assert planned_on(100, engine=None).engine is None


def test_while_all_load_the_engine_is_awake() -> None:
    """2 + 6 + a renderer of 40 + half of the GPU + a judge of a quarter."""
    loading = planned_on(100, judge_share=0.25).total_gb("load")
    assert loading == pytest.approx(2 + 6 + 40 + 50 + 25, abs=1e-4)


EDIT = "qwen_image_edit"


@pytest.mark.parametrize(
    ("name", "changes", "kept", "forward"),
    [
        (EDIT, [], "condition render reference learn", "condition reference"),
        (EDIT, ["policy.conditioning=base"], "reference learn", "condition reference"),
        (EDIT, ["policy.thought={}"], "reference learn", "condition reference"),
        ("vlm_reasoning", [], "reference learn", "reference"),
        ("vlm_reasoning", ["max_staleness=1"], "reference learn", "condition reference"),
    ],
)
def test_only_hidden_states_need_a_forward_before_the_picture(
    name: str, changes: list[str], kept: str, forward: str
) -> None:
    planned = plan_of(build.resolve(shipped(name, *changes)), 141)
    phases = {item.part: " ".join(item.phases) for item in planned.items}
    assert phases["activations, kept"] == kept and phases["forward, workspace"] == forward


@pytest.mark.parametrize(
    ("command", "share"),
    [
        ("scripts/serve_judge.sh --gpu-memory-utilization 0.3", 0.3),
        ("vllm serve some/judge --gpu-memory-utilization=0.25", 0.25),
        ("env CUDA_VISIBLE_DEVICES=8,9 scripts/serve_judge.sh", 0.0),
        ("scripts/serve_judge.sh", None),
        ("./my_judge", None),
        ("", 0.0),
    ],
)
def test_a_judge_that_the_run_starts_is_counted(command: str, share: float | None) -> None:
    words = [f"judge.start_command={json.dumps(command.split())}", "judge.api_base="]
    resolved = build.resolve(shipped(EDIT, *words))
    assert judge_share(resolved) == share
    assert any("judge.start_command" in line for line in unknowns(resolved)) == (share is None)


def test_zero_stages_under_full_fine_tuning() -> None:
    by_stage = [planned_on(100, lora_rank=None, zero_stage=stage) for stage in range(4)]
    # 3e9 parameters: bfloat16 weights 6 GB; masters and moments 36 GB; float32 gradients 12 GB.
    assert [gb(p, "policy weights") for p in by_stage] == pytest.approx([6, 6, 6, 1.5])
    assert [gb(p, "optimizer state") for p in by_stage] == pytest.approx([36, 9, 9, 9])
    assert [gb(p, "gradients") for p in by_stage] == pytest.approx([12, 12, 3, 3])
    # From stage 2 on, the ranks run their backwards together, after the last grade.
    early = [p.total_gb("reference") - by_stage[0].total_gb("reference") for p in by_stage[:3]]
    assert early == pytest.approx([0, -27, -27 - 12])
    reference = planned_on(100, lora_rank=None, reads_reference=True)
    # The reference is freed before the first backward.
    assert reference.total_gb("learn") == by_stage[0].total_gb("learn")
    assert reference.total_gb("reference") == pytest.approx(by_stage[0].total_gb("reference") + 6)


def test_models_on_other_devices_are_not_counted() -> None:
    elsewhere, here = (
        plan_of(build.resolve(shipped("qwen_image_edit", f"renderer.device={device}")), 141)
        for device in ("cuda:1", "cuda:0")
    )
    assert not any(item.part.startswith("renderer") for item in elsewhere.items)
    # 13.63 B + 0.127 B weights of two bytes.
    parts = {item.part: item.gb for item in here.items}
    assert parts["renderer transformer"] + parts["renderer vae"] == pytest.approx(27.5, abs=0.1)


def test_the_engine_cache_by_hand() -> None:
    # A token takes 2 layers x 2 x 2 values x 2 bytes = 16 B. Share 8.5 GB - 6 - 1.5 = 1 GB, less a
    # step of 8 x 100 tokens of 250 B: 999.8 MB are 3 905 468 blocks of 16 tokens, 7 a completion.
    planned = planned_on(17, engine=replace(ENGINE, step_bytes=250))
    assert holds(engine_line(planned, 17), "62487488 tokens ... 100 tokens ... 557924.00x")
    assert engine_line(planned_on(14), 14).endswith("0.00x")
    assert gb(planned_on(17, engine=None), "key-value cache") == pytest.approx(300 * 16e-9)


def test_the_least_memory_an_engine_starts_with() -> None:
    many = replace(ENGINE, max_num_seqs=10**6, longest_tokens=65)

    def on_gpu(gpu_gb: float, **changes: Any) -> InferenceEngine:
        return replace(many, **changes).on_gpu(1, gpu_gb, 0.0)

    # Weights, 1.5 GB, a step of 16384 tokens of 240 B (half on a small GPU); 65 tokens in 5 blocks
    # of 16, and vLLM's own.
    least_gb = 6 + 1.5 + 16384 * 240e-9 + 96 * 16e-9
    assert on_gpu(80, share=None).claimed_gb == pytest.approx(least_gb, rel=1e-12)
    assert on_gpu(24, share=None).claimed_gb == pytest.approx(least_gb - 8192 * 240e-9, rel=1e-12)
    assert on_gpu(80, share=0.09).at_once <= 1 < on_gpu(80, share=0.10).at_once


def test_an_automatic_share_holds_an_iteration_or_as_much_as_fits() -> None:
    """A completion of 100 tokens: 7 blocks of 16 tokens of 16 kB, 1.792 MB; one block is vLLM's."""
    fat = replace(ENGINE, share=None, kv_bytes=16_000)
    sizes = replace(SIZES, num_completions=200, engine=fat)

    def claimed(gpu_gb: float, **changes: Any) -> tuple[float, float]:
        engine = replace(fat, max_num_seqs=1000, **changes)
        planned = plan(replace(sizes, engine=engine), gpu_gb)
        claim = engine_claim(planned, gpu_gb)
        assert planned.engine.at_once > 1
        return claim.cache_bytes, claim.share

    beside_gb = 6 + 1.5 + 1000 * 100 * 240e-9 * 0.16384  # 16384 of those tokens at once
    cache_bytes, share = claimed(100)
    assert cache_bytes == (200 * 7 + 1) * 256_000
    assert share == pytest.approx((beside_gb + cache_bytes / 1e9) / 100, abs=1e-4)
    assert share >= (beside_gb + cache_bytes / 1e9) / 100, "vLLM checks that this much is free"
    # Nine tenths of the GPU, less the others: room for 100.5 completions, then for none.
    others_gb = plan(replace(sizes, engine=None), 1000).total_gb("load")
    tight_gb = (others_gb + beside_gb + 100.5 * 7 * 256e-6) / 0.9
    small_step_gb = 8192 * 240e-9
    assert tight_gb < 75, "on a GPU this small, vLLM halves its step"
    tight_gb -= small_step_gb / 0.9
    assert claimed(tight_gb)[0] == (100 * 7 + 1) * 256_000
    assert claimed(tight_gb - 1)[0] == (1 * 7 + 1) * 256_000
    # An engine that stays shares the GPU with the largest phase. max_num_seqs is the upper limit.
    assert claimed(tight_gb, residency="resident")[0] < claimed(tight_gb)[0]
    assert int(plan(replace(sizes, engine=replace(fat, max_num_seqs=8)), 100).engine.at_once) == 8
    assert engine_claim(planned_on(100), 100) is None, "a stated share needs no claim"


def test_memory_of_an_optimizer_step_by_hand() -> None:
    """AdamW's temporaries, or ZeRO's flat gradients: 4 bytes a parameter that this rank steps."""
    steps = [
        gb(planned_on(100, lora_rank=None, zero_stage=n), "optimizer, workspace") for n in range(4)
    ]
    assert steps == pytest.approx([12, 3, 3, 6])
    planned = planned_on(100, lora_rank=None, zero_stage=2)
    # Context, weights, masters and moments, gradients, the step, the editor, a sleeping engine.
    assert planned.total_gb("step") == pytest.approx(2 + 6 + 9 + 3 + 3 + 40 + 1.5)
    assert gb(planned, "gradient bucket") == pytest.approx(5e8 * 2 / 1e9)


def test_host_memory_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    full = replace(SIZES, lora_rank=None, zero_stage=2, reads_reference=True)
    on_gpu = plan(full, 120)
    assert host_plan(full, on_gpu, 4) == pytest.approx(
        {
            "processes": 4 * 4,
            "engine asleep, pinned": 4 * 2 * 6,
            "reference weights": 4 * 6,
            "checkpoint: weights, moments": 36,
        }
    )
    # An engine that stays pins nothing; the checkpoint of an adapter is small.
    stays = planned_on(200, engine=replace(ENGINE, residency="resident"))
    assert sum(host_plan(SIZES, stays, 4).values()) == pytest.approx(16, abs=1e-3)
    frozen = replace(SIZES, host_shared_gb=10, host_copied_gb=2)
    assert sum(host_plan(frozen, stays, 4).values()) == pytest.approx(34, abs=1e-3)
    # Here torch pins the requested size, without rounding up to a power of two.
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "pinned_max_cached_size_mb:1")
    assert host_plan(full, on_gpu, 4)["engine asleep, pinned"] == pytest.approx(4 * 6)


def test_too_little_host_memory_is_reported() -> None:
    planned = {"engine asleep, pinned": 30.0}
    assert host_problems(planned, 8, None) == host_problems(planned, 8, 30) == []
    [line] = host_problems(planned, 8, 20)
    assert holds(line, "host memory: 30.0 GB ... 8 ranks ... PYTORCH_ALLOC_CONF=pinned_")


@pytest.mark.parametrize(
    ("files", "expected_gb"),
    [
        ({}, 64),
        ({"self/cgroup": "0::/\n", "memory.max": "max\n"}, 64),
        ({"self/cgroup": "0::/\n", "memory.max": "32000000000\n"}, 32),
        (  # a cgroup inside a smaller one
            {
                "self/cgroup": "4:cpu:/x\n0::/a/b\n",
                "a/b/memory.max": "9000000000\n",
                "a/memory.max": "8000000000\n",
            },
            8,
        ),
    ],
)
def test_host_memory_is_the_smallest_limit(
    tmp_path, monkeypatch, files: dict[str, str], expected_gb: float
) -> None:
    pages = {"SC_PHYS_PAGES": 16_000_000, "SC_PAGE_SIZE": 4000}
    monkeypatch.setattr("rl.check.this_machine.os.sysconf", pages.__getitem__)
    for name, text in files.items():
        file = tmp_path / ("proc" if name == "self/cgroup" else "sys/fs/cgroup") / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert host_memory_gb(tmp_path) == pytest.approx(expected_gb)
