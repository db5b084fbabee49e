"""DeepSpeed ZeRO 1-3 against plain torch, on one process; `test_learner_backends.py` has ranks."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tiny_qwen
import torch
from tiny_learner import (
    ADAM_EPS,
    NUM_ITERATIONS,
    Graded,
    make_config,
    make_sequences,
    relative_difference,
    snapshot,
    train,
    update,
)
from tiny_policy import make_policy
from tiny_rounding import NATS, STEPPED

from rl.api.types import TrainSequence
from rl.learner import deepspeed
from rl.learner.backends import TorchBackend
from rl.learner.deepspeed import deepspeed_config
from rl.learner.learner import Learner
from rl.policies.qwen2_5_vl import Qwen25VL
from rl.ranks.dist import Dist

pytestmark = pytest.mark.slow

STAGES = (1, 2, 3)
KL = {"kl_coeff": 0.1, "importance_correction": "sequence"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_qwen.save_policy_folder(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def sequences(folder: str) -> list[Graded]:
    return make_sequences(make_policy(folder))


@pytest.fixture(autouse=True)
def shard_everything() -> Iterator[None]:
    """ZeRO-3 would leave this small a model whole on every rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deepspeed, "PERSISTENCE_THRESHOLD_NUMEL", 0)
        yield


@pytest.fixture(scope="module")
def plain(folder: str, sequences: list[Graded]) -> dict[str, Any]:
    """What plain torch makes of the same three iterations."""
    learner = make_learner(folder, None)
    seen = train(learner, sequences, 0, 3)
    return {"weights": snapshot(learner), "metrics": seen, "state": learner.state()}


def make_learner(folder: str, stage: int | None, **section: Any) -> Learner:
    """`stage` None: plain torch; `section`: keys of the policy's."""
    return learner_of(make_policy(folder, **section), stage)


def learner_of(policy: Qwen25VL, stage: int | None, max_staleness: int = 0) -> Learner:
    backend: dict[str, Any] = {"backend": "torch" if stage is None else "deepspeed"}
    backend |= {"zero_stage": stage or 0, "adam_eps": ADAM_EPS}
    config = make_config(KL, max_staleness=max_staleness, **backend)
    return Learner(policy, config, Dist(), NUM_ITERATIONS)


@pytest.mark.parametrize("stage", STAGES)
def test_zero_agrees_with_plain_torch(
    folder: str, sequences: list[Graded], plain: dict[str, Any], stage: int
) -> None:
    policy = make_policy(folder)
    learner = learner_of(policy, stage)
    # Every forward and reference pass first, and the graphs kept, as when a judge is slow.
    metrics = [update(learner, sequences, iteration, rollout=True) for iteration in range(3)]
    seen = [m.merge([m.state()]) for m in metrics]
    assert relative_difference(snapshot(learner), plain["weights"]) <= STEPPED
    tensors, meta = learner.state()
    assert meta == plain["state"][1] == {"version": 3}
    assert relative_difference(tensors, plain["state"][0]) <= STEPPED
    # The policy's own forwards (conditioning) bypass the engine and see the trained weights too.
    rows = [(s.prompt, s.token_ids) for s in sequences[:1]]
    with torch.no_grad():
        direct = policy.module(policy.collate(rows)).logprobs[0]
    assert direct.tolist() == pytest.approx(learner.logprobs(rows)[0], abs=NATS)
    for ours, theirs in zip(seen, plain["metrics"], strict=True):
        for name in ("loss/total", "optimizer/grad_norm", "kl/reference_k3"):
            assert ours[name] == pytest.approx(theirs[name], rel=STEPPED, abs=STEPPED), name


def test_zero_3_keeps_what_a_stale_rollout_measured(folder: str) -> None:
    """Under ZeRO-3 forwards are made by all ranks or none, but weights have moved since."""
    policy = make_policy(folder)
    learner = learner_of(policy, 3, max_staleness=1)
    first, *_ = sequences = make_sequences(policy, groups=1)
    ids_G = [s.token_ids for s in sequences]
    opened = learner.begin(0, [first.prompt], [ids_G], [len(ids_G)])
    opened.note_old_logprobs()
    train(learner, make_sequences(policy, seed=1), 0, 1)
    opened.accumulate(0, [TrainSequence(s.loss_mask, 1.0, s.sampler_logprobs) for s in sequences])
    metrics = opened.step()
    assert abs(metrics.merge([metrics.state()])["policy/ratio_max"] - 1) > 1e-3


@pytest.mark.parametrize(("stage", "other"), [(None, 1), (1, 2), (2, 3), (3, None)])
def test_state_continues_bit_for_bit_and_under_another_backend(
    folder: str, sequences: list[Graded], stage: int | None, other: int | None
) -> None:
    straight = make_learner(folder, stage)
    fresh, _ = straight.state()
    assert not any(t.any() for name, t in fresh.items() if name.startswith("exp_avg"))
    train(straight, sequences, 0, 2)
    tensors, meta = straight.state()
    train(straight, sequences, 2, 4)
    expected, _ = straight.state()

    for again in (make_learner(folder, stage), straight):  # afresh, and rewound
        again.load_state(tensors, meta)
        train(again, sequences, 2, 4)
        assert again.version == 4
        assert relative_difference(again.state()[0], expected) == 0

    elsewhere = make_learner(folder, other)
    elsewhere.load_state(tensors, meta)
    assert relative_difference(elsewhere.state()[0], tensors) == 0
    train(elsewhere, sequences, 2, 4)
    assert relative_difference(elsewhere.state()[0], expected) <= STEPPED


@pytest.mark.parametrize("stage", STAGES)
def test_adapters_stay_float32_on_a_bfloat16_base(
    folder: str, sequences: list[Graded], stage: int
) -> None:
    policy = make_policy(folder, dtype="bfloat16")
    learner = learner_of(policy, stage)
    (seen,) = train(learner, sequences, 0, 1)
    dtypes = {p.requires_grad: p.dtype for p in policy.module.parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}
    plain = make_learner(folder, None, dtype="bfloat16")
    (expected,) = train(plain, sequences, 0, 1)
    # Stage 3's hooks make autograd add up bfloat16 activation gradients in another order, and
    # Adam's first step is nearly the gradient's sign: there, weights say nothing.
    # Of a norm, bfloat16's 8 bits leave two or three digits.
    assert seen["optimizer/grad_norm"] == pytest.approx(expected["optimizer/grad_norm"], rel=1e-2)
    if stage < 3:
        assert relative_difference(snapshot(learner), snapshot(plain)) <= 1e-4


@pytest.mark.parametrize("stage", (2, 3))
def test_bfloat16_full_fine_tune_keeps_float32_masters(folder: str, stage: int) -> None:
    config = make_config(backend="deepspeed", zero_stage=stage, learning_rate=1e-5)
    policy = make_policy(folder, dtype="bfloat16", lora=None)
    learner = Learner(policy, config, Dist(), NUM_ITERATIONS)
    sequences = make_sequences(policy, groups=2)
    before = snapshot(learner)
    train(learner, sequences, 0, 2)
    after = snapshot(learner)
    lost = sum(
        int(((before[n] != after[n]) & (before[n].bfloat16() == after[n].bfloat16())).sum())
        for n in after
    )
    assert {t.dtype for t in after.values()} == {torch.float32}
    assert lost > 1000  # steps that bfloat16 alone would have lost
    exported = learner.export_weights().tensors
    live = dict(policy.module.named_parameters())
    for name, master in after.items():
        tensor = exported[name.removeprefix("model.")]
        assert torch.equal(tensor, master.bfloat16())
        # Masters of a large model do not fit beside an awake engine: live weights leave instead.
        assert stage == 3 or tensor.data_ptr() == live[name].data_ptr()
    tensors, meta = learner.state()
    train(learner, sequences, 2, 3)
    again = Learner(make_policy(folder, dtype="bfloat16", lora=None), config, Dist(), 10)
    again.load_state(tensors, meta)
    train(again, sequences, 2, 3)
    assert relative_difference(snapshot(again), snapshot(learner)) == 0


def test_the_reference_of_a_full_fine_tune_leaves_zero_2_as_it_was(folder: str) -> None:
    """Base weights stand in for parameters that are views of DeepSpeed's flat buffer, while graphs
    over these wait for their backwards."""
    config = make_config(KL, backend="deepspeed", zero_stage=2, learning_rate=1e-3)
    policy = make_policy(folder, lora=None)
    learner = Learner(policy, config, Dist(), NUM_ITERATIONS)
    places = {name: p.data_ptr() for name, p in policy.module.named_parameters()}
    sequences = make_sequences(policy, groups=2)
    rows = [(s.prompt, s.token_ids) for s in sequences]
    base = np.concatenate(learner.logprobs(rows))
    metrics = [update(learner, sequences, iteration, rollout=True) for iteration in range(3)]
    seen = [m.merge([m.state()]) for m in metrics]
    assert seen[0]["kl/reference_k3"] < 1e-6 < 1e-4 < seen[2]["kl/reference_k3"]
    assert abs(np.concatenate(learner.logprobs(rows)) - base).max() > 1e-2
    with policy.reference():
        assert np.concatenate(learner.logprobs(rows)) == pytest.approx(base, abs=NATS)
    live = dict(policy.module.named_parameters())
    assert {name: parameter.data_ptr() for name, parameter in live.items()} == places
    for name, master in snapshot(learner).items():
        assert torch.equal(live[name], master)
    again = Learner(make_policy(folder, lora=None), config, Dist(), 10)
    train(again, sequences, 0, 3)
    apart = relative_difference(snapshot(again), snapshot(learner))
    assert apart <= STEPPED, "graphs kept or not"


def test_stages_without_readable_masters_are_refused() -> None:
    config = make_config(backend="deepspeed", zero_stage=1).optimizer
    with pytest.raises(ValueError, match="zero_stage 2 or 3"):
        deepspeed_config(config, torch.bfloat16, 1, 10)


def test_zero_1_and_2_and_3_shard_and_0_does_not(folder: str) -> None:
    """Guards the comparison above: a stage that silently fell back would agree all too well."""
    assert isinstance(make_learner(folder, 0)._backend, TorchBackend)
    names = {
        stage: type(make_learner(folder, stage)._backend._engine.optimizer) for stage in STAGES
    }
    assert [names[s].__name__ for s in STAGES] == [
        "DeepSpeedZeroOptimizer",
        "DeepSpeedZeroOptimizer",
        "DeepSpeedZeroOptimizer_Stage3",
    ]
