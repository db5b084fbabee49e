"""DeepSpeed ZeRO 1-3 against plain torch on one process."""

from typing import Any

import numpy as np
import pytest
import torch
from tiny_learner import (
    ADAM_EPS,
    KL,
    NUM_ITERATIONS,
    Graded,
    make_config,
    make_sequences,
    relative_difference,
    snapshot,
    train,
)
from tiny_policy import make_policy
from tiny_rounding import FORWARD_TOL, WEIGHT_TOL

from rl.learner import backends
from rl.learner.backends import TorchBackend, deepspeed_config
from rl.learner.learner import Learner
from rl.policies.qwen_vl import Qwen25VL
from rl.ranks.dist import Dist

pytestmark = pytest.mark.slow

STAGES = (1, 2, 3)


@pytest.fixture(scope="module")
def sequences() -> list[Graded]:
    return make_sequences(make_policy())


@pytest.fixture(autouse=True)
def shard_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes ZeRO-3 shard even this small model."""
    monkeypatch.setattr(backends, "PERSISTENCE_THRESHOLD_NUMEL", 0)


@pytest.fixture(scope="module")
def plain(sequences: list[Graded]) -> dict[str, Any]:
    """Weights, metrics and state of plain torch after the same three iterations."""
    learner = make_learner(None)
    logged = train(learner, sequences, 0, 3)
    return {"weights": snapshot(learner), "metrics": logged, "state": learner.state()}


def make_learner(stage: int | None, **section: Any) -> Learner:
    """`stage` None: plain torch; `section`: config keys of the policy."""
    return learner_of(make_policy(**section), stage)


def learner_of(policy: Qwen25VL, stage: int | None) -> Learner:
    backend: dict[str, Any] = {"backend": "torch" if stage is None else "deepspeed"}
    backend |= {"zero_stage": stage or 0, "adam_eps": ADAM_EPS}
    return Learner(policy, make_config(KL, **backend), Dist(), NUM_ITERATIONS)


@pytest.mark.parametrize("stage", STAGES)
def test_zero_agrees_with_plain_torch(
    sequences: list[Graded], plain: dict[str, Any], stage: int
) -> None:
    policy = make_policy()
    learner = learner_of(policy, stage)
    # All forward and reference passes come first, with graphs kept, as with a slow judge.
    logged = train(learner, sequences, 0, 3, rollout=True)
    assert relative_difference(snapshot(learner), plain["weights"]) <= WEIGHT_TOL
    tensors, meta = learner.state()
    assert meta == plain["state"][1] == {"version": 3}
    assert relative_difference(tensors, plain["state"][0]) <= WEIGHT_TOL
    # Forwards of the policy itself (conditioning) bypass DeepSpeed and use the trained weights.
    rows = [(s.prompt, s.token_ids) for s in sequences[:1]]
    with torch.no_grad():
        direct = policy.module(policy.collate(rows)).logprobs[0]
    assert direct.tolist() == pytest.approx(learner.logprobs(rows)[0], abs=FORWARD_TOL)
    for ours, theirs in zip(logged, plain["metrics"], strict=True):
        for name in ("loss/total", "optimizer/grad_norm", "kl/reference_k3"):
            assert ours[name] == pytest.approx(theirs[name], rel=WEIGHT_TOL, abs=WEIGHT_TOL), name


@pytest.mark.parametrize(("stage", "other"), [(None, 1), (1, 2), (2, 3), (3, None)])
def test_a_loaded_state_continues_bit_for_bit_and_closely_under_another_backend(
    sequences: list[Graded], stage: int | None, other: int | None
) -> None:
    uninterrupted = make_learner(stage)
    fresh, _ = uninterrupted.state()
    assert not any(t.any() for name, t in fresh.items() if name.startswith("exp_avg"))
    train(uninterrupted, sequences, 0, 2)
    tensors, meta = uninterrupted.state()
    train(uninterrupted, sequences, 2, 4)
    expected, _ = uninterrupted.state()

    for again in (make_learner(stage), uninterrupted):  # a new learner, and the same one rewound
        again.load_state(tensors, meta)
        train(again, sequences, 2, 4)
        assert again.version == 4
        assert relative_difference(again.state()[0], expected) == 0

    elsewhere = make_learner(other)
    elsewhere.load_state(tensors, meta)
    assert relative_difference(elsewhere.state()[0], tensors) == 0
    train(elsewhere, sequences, 2, 4)
    assert relative_difference(elsewhere.state()[0], expected) <= WEIGHT_TOL


@pytest.mark.parametrize("stage", STAGES)
def test_adapters_stay_float32_on_a_bfloat16_base(sequences: list[Graded], stage: int) -> None:
    policy = make_policy(dtype="bfloat16")
    learner = learner_of(policy, stage)
    (logged,) = train(learner, sequences, 0, 1)
    dtypes = {p.requires_grad: p.dtype for p in policy.module.parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}
    plain = make_learner(None, dtype="bfloat16")
    (expected,) = train(plain, sequences, 0, 1)
    # Stage 3's hooks make autograd sum bfloat16 activation gradients in another order, and Adam's
    # first step is nearly the gradient's sign, so weights are not compared at stage 3.
    # bfloat16 has 8 bits, so a norm has two or three digits.
    assert logged["optimizer/grad_norm"] == pytest.approx(expected["optimizer/grad_norm"], rel=1e-2)
    if stage < 3:
        assert relative_difference(snapshot(learner), snapshot(plain)) <= 1e-4


@pytest.mark.parametrize("stage", (2, 3))
def test_bfloat16_full_fine_tune_keeps_float32_masters(stage: int) -> None:
    config = make_config(backend="deepspeed", zero_stage=stage, learning_rate=1e-5)
    policy = make_policy(dtype="bfloat16", lora=None)
    learner = Learner(policy, config, Dist(), NUM_ITERATIONS)
    sequences = make_sequences(policy, groups=2)
    before = snapshot(learner)
    train(learner, sequences, 0, 2)
    after = snapshot(learner)
    num_lost = sum(
        int(((before[n] != after[n]) & (before[n].bfloat16() == after[n].bfloat16())).sum())
        for n in after
    )
    assert {t.dtype for t in after.values()} == {torch.float32}
    assert num_lost > 1000, "steps too small for bfloat16"
    exported = learner.export_weights().tensors
    parameters = dict(policy.module.named_parameters())
    for name, master in after.items():
        tensor = exported[name.removeprefix("model.")]
        assert torch.equal(tensor, master.bfloat16())
        # Stage 2 exports live weights: masters of a large model do not fit beside an awake engine.
        assert stage == 3 or tensor.data_ptr() == parameters[name].data_ptr()
    tensors, meta = learner.state()
    train(learner, sequences, 2, 3)
    again = Learner(make_policy(dtype="bfloat16", lora=None), config, Dist(), 10)
    again.load_state(tensors, meta)
    train(again, sequences, 2, 3)
    assert relative_difference(snapshot(again), snapshot(learner)) == 0


def test_the_reference_of_a_full_fine_tune_does_not_change_zero_2() -> None:
    """`reference()` swaps in base weights for parameters that are views of DeepSpeed's flat buffer,
    while kept graphs still need these parameters."""
    config = make_config(KL, backend="deepspeed", zero_stage=2, learning_rate=1e-3)
    policy = make_policy(lora=None)
    learner = Learner(policy, config, Dist(), NUM_ITERATIONS)
    addresses = {name: p.data_ptr() for name, p in policy.module.named_parameters()}
    sequences = make_sequences(policy, groups=2)
    rows = [(s.prompt, s.token_ids) for s in sequences]
    base = np.concatenate(learner.logprobs(rows))
    logged = train(learner, sequences, 0, 3, rollout=True)
    assert logged[0]["kl/reference_k3"] < 1e-6 < 1e-4 < logged[2]["kl/reference_k3"]
    assert abs(np.concatenate(learner.logprobs(rows)) - base).max() > 1e-2
    with policy.reference():
        assert np.concatenate(learner.logprobs(rows)) == pytest.approx(base, abs=FORWARD_TOL)
    parameters = dict(policy.module.named_parameters())
    assert {name: parameter.data_ptr() for name, parameter in parameters.items()} == addresses
    for name, master in snapshot(learner).items():
        assert torch.equal(parameters[name], master)
    again = Learner(make_policy(lora=None), config, Dist(), 10)
    train(again, sequences, 0, 3)
    difference = relative_difference(snapshot(again), snapshot(learner))
    assert difference <= WEIGHT_TOL, "with and without kept graphs"


def test_stages_without_readable_masters_are_refused() -> None:
    config = make_config(backend="deepspeed", zero_stage=1).optimizer
    with pytest.raises(ValueError, match="zero_stage 2 or 3"):
        deepspeed_config(config, torch.bfloat16, 1, 10)


def test_zero_1_2_and_3_shard_and_0_does_not() -> None:
    """Guards the comparisons above: a stage that fell back to plain torch would always agree."""
    assert isinstance(make_learner(0)._backend, TorchBackend)
    optimizers = [make_learner(stage)._backend._engine.optimizer for stage in STAGES]
    assert [type(optimizer).__name__ for optimizer in optimizers] == [
        "DeepSpeedZeroOptimizer",
        "DeepSpeedZeroOptimizer",
        "DeepSpeedZeroOptimizer_Stage3",
    ]
