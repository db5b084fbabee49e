"""The learner on a tiny Qwen2.5-VL with LoRA: plain torch backend, one process or two ranks."""

import math
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
import torch
from tiny_calls import noted_calls
from tiny_learner import (
    KL,
    NUM_ITERATIONS,
    Graded,
    gradient,
    make_config,
    make_sequences,
    merged,
    opened,
    relative_difference,
    run_ranks,
    snapshot,
    train,
    update,
)
from tiny_policy import make_policy, saved, trainable
from tiny_rounding import FORWARD_TOL, GRADIENT_TOL, WEIGHT_TOL, apart

from rl.api.types import Prompt, Sample
from rl.learner import backends
from rl.learner.backends import TorchBackend
from rl.learner.learner import NUM_MEASURED, Learner
from rl.learner.train_step import TrainStep, pack_groups, split_evenly
from rl.policies.qwen_vl import Qwen25VL
from rl.ranks.dist import Dist

Sequences = list[Graded]
A_GROUP = 120
"""A token budget that fits one group of `make_sequences` but not two."""


@pytest.fixture(scope="module")
def reader() -> Qwen25VL:
    """A policy that only builds prompts; it is not trained."""
    return make_policy()


@pytest.fixture(scope="module")
def sequences(reader: Qwen25VL) -> Sequences:
    return make_sequences(reader)


@pytest.fixture(scope="module")
def rows(sequences: Sequences) -> list[tuple[Prompt, tuple[int, ...]]]:
    """Prompts and completions of `sequences`."""
    return [(s.prompt, s.token_ids) for s in sequences]


def make_learner(algorithm: dict[str, Any] | None = None, **optimizer: Any) -> Learner:
    return Learner(make_policy(), make_config(algorithm, **optimizer), Dist(), NUM_ITERATIONS)


# --- the gradient does not depend on the split ------------------------------------------------


@pytest.mark.parametrize(
    "loss",
    ["dapo", *(pytest.param(x, marks=pytest.mark.slow) for x in ("grpo", "dr_grpo", "gspo"))],
)
def test_gradient_does_not_depend_on_packs_or_kept_forwards(
    sequences: Sequences, loss: str
) -> None:
    by_setting = {}
    # One pack; one row per pack; one group per pack with all forwards kept, or the first only.
    for budget, kept in ((10_000, 0), (1, 0), (A_GROUP, None), (A_GROUP, A_GROUP)):
        learner = make_learner(
            {**KL, "loss": loss}, max_tokens_per_micro_batch=budget, max_kept_tokens=kept
        )
        by_setting[budget, kept] = gradient(learner, sequences, Dist(), rollout=True)
    expected = by_setting.pop((10_000, 0))
    assert max(float(t.abs().max()) for t in expected.values()) > 1e-3
    for gradients in by_setting.values():
        assert relative_difference(gradients, expected) <= GRADIENT_TOL


def test_groups_without_loss_cost_no_backward(
    sequences: Sequences, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kept forward of a pack without loss is dropped; the gradient is that of the others."""
    learner = make_learner(KL, max_tokens_per_micro_batch=A_GROUP)
    muted = [replace(s, loss_mask=(False,) * len(s.token_ids)) for s in sequences[:6]]
    backwards = noted_calls(monkeypatch, TorchBackend, "backward", lambda args, *_: args)
    mixed = gradient(learner, [*muted, *sequences[6:]], Dist(), rollout=True)
    assert len(backwards) == 2
    assert relative_difference(mixed, gradient(learner, sequences[6:], Dist())) <= GRADIENT_TOL


@pytest.mark.parametrize("loss", ["dapo", "grpo"])
def test_the_kl_of_a_group_without_spread_is_added_and_not_counted(
    sequences: Sequences, loss: str
) -> None:
    """With N tokens (or completions) in groups with spread and M in groups without, the loss is
    (sum of policy terms and KL over N + sum of KL over M) / N; if N is 0, it is the KL sum / M."""
    learner = make_learner({**KL, "loss": loss})
    with torch.no_grad():  # away from the reference, so that KL has a gradient
        for tensor in learner.trainable_tensors().values():
            tensor.add_(0.02 * torch.randn(tensor.shape, generator=torch.manual_seed(5)))
    live, flat = sequences[:6], [replace(s, advantage=0.0) for s in sequences[6:]]
    uncounted = [replace(s, counted=False) for s in flat]

    def count(graded: Sequences) -> int:
        return sum(sum(s.loss_mask) if loss == "dapo" else any(s.loss_mask) for s in graded)

    alone, of_live = (gradient(learner, groups, Dist()) for groups in (flat, live))
    expected = {n: of_live[n] + alone[n] * (count(flat) / count(live)) for n in alone}
    assert float(max(t.abs().max() for t in alone.values())) > 1e-5
    for groups, right in ((live + uncounted, expected), (uncounted, alone)):
        assert relative_difference(gradient(learner, groups, Dist()), right) <= GRADIENT_TOL


def test_the_kl_of_a_group_without_spread_pulls_back_to_the_reference(sequences: Sequences) -> None:
    """After noisy updates, the KL term alone pulls the policy back; without it nothing changes."""
    learner = make_learner(KL)
    push = [replace(s, advantage=1.0) for s in sequences[:3]]
    train(learner, push, 0, 4)
    moved = snapshot(learner)
    flat = [replace(s, advantage=0.0, counted=False) for s in push]
    silent = [replace(s, loss_mask=(False,) * len(s.token_ids)) for s in push]
    assert [row["optimizer/steps"] for row in train(learner, silent, 4, 7)] == [0, 0, 0]
    assert relative_difference(snapshot(learner), moved) == 0
    logged = train(learner, flat, 4, 10)
    kl = [row["kl/reference_k3"] for row in logged]
    assert kl[0] > 0.01 and kl[-1] < 0.5 * kl[0]
    assert logged[0]["loss/kl"] == pytest.approx(KL["kl_coeff"] * kl[0], rel=1e-4)


def gradient_on_rank(dist: Dist, folder: str) -> dict[str, Any]:
    """Gradients and metrics of uneven shares: 9 and 3 sequences, then 12 and 0."""
    result = {}
    for name, first in (("uneven", 9), ("one rank idle", 12)):
        policy = make_policy(folder)
        with torch.no_grad():
            for parameter in trainable(policy).values():
                parameter.add_(0.1 * dist.rank)  # ranks start with different weights
        learner = Learner(policy, make_config(KL), dist, NUM_ITERATIONS)
        sequences = make_sequences(policy)
        mine = sequences[:first] if dist.rank == 0 else sequences[first:]
        result[name] = gradient(learner, mine, dist)
        result[f"{name} logprobs"] = learner.logprobs([(s.prompt, s.token_ids) for s in mine])
        result[f"{name} metrics"] = dist.reduce(update(learner, mine, 0))
        result[f"{name} weights"] = snapshot(learner)
    return result


@pytest.mark.slow
def test_two_ranks_give_the_gradient_of_one(
    sequences: Sequences, rows: list[Any], tmp_path: Path
) -> None:
    alone = make_learner(KL)
    expected = gradient(alone, sequences, Dist())
    logprobs = [x for row in alone.logprobs(rows) for x in row]
    (metrics,) = train(alone, sequences, 0, 1)
    ranks = run_ranks(gradient_on_rank, 2, tmp_path, folder=saved("qwen2_5_vl"))
    for name in ("uneven", "one rank idle"):
        for rank in ranks:
            assert relative_difference(rank[name], expected) <= GRADIENT_TOL
        together = [x for rank in ranks for row in rank[f"{name} logprobs"] for x in row]
        assert together == pytest.approx(logprobs, abs=FORWARD_TOL)
        # Both ranks have equal weights bit for bit, and the metrics of one process.
        assert relative_difference(*(rank[f"{name} weights"] for rank in ranks)) == 0
        shared = ranks[0][f"{name} metrics"]
        assert shared.keys() == metrics.keys()
        for key, value in metrics.items():
            assert shared[key] == pytest.approx(value, rel=1e-4, abs=GRADIENT_TOL), key


# --- what an update does ----------------------------------------------------------------------


def test_first_loss_is_the_token_mean_of_advantages(sequences: Sequences) -> None:
    learner = make_learner({"importance_correction": "none"})
    (logged,) = train(learner, sequences, 0, 1)
    num_tokens = sum(sum(s.loss_mask) for s in sequences)
    expected = -sum(s.advantage * sum(s.loss_mask) for s in sequences) / num_tokens
    assert logged["loss/policy"] == pytest.approx(expected, abs=1e-6)  # every ratio is 1
    assert logged["tokens/trained"] == num_tokens
    assert (logged["policy/ratio_mean"], logged["policy/clip_fraction"]) == (1.0, 0.0)
    assert logged["optimizer/steps"] == learner.version == 1


@pytest.mark.parametrize("num_updates", [1, 2])
def test_dr_grpo_divides_by_the_planned_completions(sequences: Sequences, num_updates: int) -> None:
    """The divisor is 12 planned completions x 12 tokens, although one group of 3 was dropped."""
    algorithm = {"loss": "dr_grpo", "importance_correction": "none"}
    learner = make_learner(algorithm, updates_per_iteration=num_updates, learning_rate=1e-12)
    sequences = sequences[:9]
    (logged,) = train(learner, sequences, 0, 1)
    total = -sum(s.advantage * sum(s.loss_mask) for s in sequences)
    assert logged["loss/policy"] == pytest.approx(total / (12 * 12), rel=1e-4)


def test_mismatch_metrics_agree_with_the_log_probs(sequences: Sequences, rows: list[Any]) -> None:
    learner = make_learner({"importance_correction": "token", "importance_cap": 1.5})
    trainer = learner.logprobs(rows)
    d = [
        now - sampled
        for sequence, row in zip(sequences, trainer, strict=True)
        for now, sampled, keep in zip(
            row, sequence.sampler_logprobs, sequence.loss_mask, strict=True
        )
        if keep
    ]
    (logged,) = train(learner, sequences, 0, 1)
    w = [math.exp(x) for x in d]
    near = {"rel": 1e-4, "abs": 1e-5}
    assert logged["mismatch/k1"] == pytest.approx(-sum(d) / len(d), **near)
    assert logged["mismatch/k3"] == pytest.approx(sum(w) / len(d) - 1 - sum(d) / len(d), **near)
    assert logged["mismatch/max_abs_dlogp"] == pytest.approx(max(map(abs, d)), **near)
    ess = sum(w) ** 2 / (len(w) * sum(x * x for x in w))
    assert logged["mismatch/ess"] == pytest.approx(ess, **near)
    assert logged["mismatch/weight_mean"] == pytest.approx(
        sum(min(x, 1.5) for x in w) / len(w), **near
    )


def test_masked_tokens_carry_no_gradient_but_are_attended_to(sequences: Sequences) -> None:
    learner = make_learner()
    first, *_ = sequences
    mask = (True,) * (len(first.token_ids) - 1) + (False,)
    cut = replace(first, loss_mask=mask)
    other_end = replace(cut, token_ids=(*first.token_ids[:-1], 11))
    other_start = replace(cut, token_ids=(11, *first.token_ids[1:]))
    base, end, start = (gradient(learner, [s], Dist()) for s in (cut, other_end, other_start))
    assert relative_difference(end, base) <= GRADIENT_TOL
    assert relative_difference(start, base) > 1e-3


@pytest.mark.parametrize(
    ("reads_states", "backend"),
    [(True, "torch"), (False, "torch"), pytest.param(False, "deepspeed", marks=pytest.mark.slow)],
)
def test_stale_rollouts_are_corrected_by_the_ratio(
    sequences: Sequences,
    rows: list[Any],
    reader: Qwen25VL,
    monkeypatch: pytest.MonkeyPatch,
    reads_states: bool,
    backend: str,
) -> None:
    """With `max_staleness: 1` weights change between rollout and update. `reads_states`: the
    rollout has forwarded its rows for the renderer. DeepSpeed shards even this small model."""
    monkeypatch.setattr(backends, "PERSISTENCE_THRESHOLD_NUMEL", 0)
    learner = make_learner(max_staleness=1, backend=backend, zero_stage=3)
    sequences = sequences[:3]
    before = learner.logprobs(rows[:3])
    step, _ = opened(learner, sequences)
    for micro_batch in step.micro_batches if reads_states else ():
        step.forward(micro_batch)
    step.compute_old_logprobs()
    train(learner, make_sequences(reader, seed=1), 0, 1)
    after = learner.logprobs(rows[:3])
    step.accumulate(0, [s.sequence for s in sequences])
    logged = merged(step.step())
    ratios = [
        math.exp(now - then)
        for s, now_T, then_T in zip(sequences, after, before, strict=True)
        for now, then, keep in zip(now_T, then_T, s.loss_mask, strict=True)
        if keep
    ]
    assert abs(max(ratios) - 1) > 1e-3, "the weights moved"
    assert logged["policy/ratio_max"] == pytest.approx(max(ratios), rel=1e-4)
    assert logged["policy/ratio_mean"] == pytest.approx(sum(ratios) / len(ratios), rel=1e-4)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_rise_is_the_excess_of_reward_times_the_change_of_the_log_prob(
    sequences: Sequences, rows: list[Any], monkeypatch: pytest.MonkeyPatch, sign: float
) -> None:
    """`sign` -1: the loss has the wrong sign. The excess of reward is set to the advantage here."""
    learner = make_learner(learning_rate=1e-4)
    before = learner.logprobs(rows)
    backward = learner._backend.backward
    monkeypatch.setattr(learner._backend, "backward", lambda loss: backward(sign * loss))
    (logged,) = train(learner, sequences, 0, 1)
    products = [
        s.advantage * sum(b - a for a, b, keep in zip(*each, s.loss_mask, strict=True) if keep)
        for s, *each in zip(sequences, before, learner.logprobs(rows), strict=True)
    ]
    mean, error = fmean(products), stdev(products) / len(products) ** 0.5
    assert logged["policy/rise"] == pytest.approx(mean, rel=1e-3)
    assert logged["policy/rise_error"] == pytest.approx(error, rel=1e-3)
    assert sign * mean > 0
    assert "policy/rise" not in merged(update(learner, sequences, NUM_MEASURED))


def test_a_step_that_moves_no_log_prob_has_a_rise_of_0(sequences: Sequences) -> None:
    (logged,) = train(make_learner(learning_rate=1e-12), sequences, 0, 1)
    assert logged["policy/rise"] == logged["policy/rise_error"] == 0.0


@pytest.mark.slow
def test_weights_do_not_depend_on_the_judges_speed(sequences: Sequences) -> None:
    """While the judge grades, no, some or all packs are computed ahead; half of the groups have no
    loss, and one more member is UNGRADED."""

    def weights_after(num_packs_ahead: int) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        learner = make_learner(KL, max_tokens_per_micro_batch=400)
        step, groups = opened(learner, sequences)
        assert 1 < len(step.micro_batches) < 4
        packs_ahead = iter(range(num_packs_ahead))
        step.work_ahead(lambda: next(packs_ahead, None) is not None)
        for p, (first, _, last) in enumerate(groups):
            graded = [first.sequence, None, last.sequence]
            step.accumulate(p, [None] * 3 if p in (0, 3) else graded)
        return snapshot(learner), merged(step.step())

    at_once, metrics = weights_after(0)
    for num_packs_ahead in (1, 3, 100):
        weights, logged = weights_after(num_packs_ahead)
        assert logged == pytest.approx(metrics, rel=GRADIENT_TOL, abs=FORWARD_TOL)
        for name, tensor in at_once.items():
            assert apart(weights[name], tensor) <= WEIGHT_TOL * tensor.abs().max(), name


@pytest.mark.slow
def test_two_updates_per_iteration_step_on_one_half_of_the_groups_each(
    sequences: Sequences,
) -> None:
    twice = make_learner(KL, updates_per_iteration=2)
    (logged,) = train(twice, sequences, 0, 1)
    assert logged["optimizer/steps"] == twice.version == 2
    assert logged["policy/ratio_max"] > 1.0001  # the second step is off-policy

    by_hand = make_learner(KL, max_staleness=1)
    halves = [sequences[:6], sequences[6:]]
    for step, groups in [forwarded(by_hand, half) for half in halves]:  # with the first weights
        for p, group in enumerate(groups):
            step.accumulate(p, [s.sequence for s in group])
        step.step()
    assert relative_difference(snapshot(twice), snapshot(by_hand)) <= WEIGHT_TOL


def forwarded(learner: Learner, sequences: Sequences) -> tuple[TrainStep, list[Sequences]]:
    """Opens an update and forwards all rows."""
    step, groups = opened(learner, sequences)
    for micro_batch in step.micro_batches:
        step.forward(micro_batch)
    return step, groups


def test_graphs_are_kept_up_to_a_total_number_of_tokens(sequences: Sequences) -> None:
    limit = 2 * max(len(one.prompt.token_ids) + len(one.token_ids) for one in sequences)
    learner = make_learner(max_tokens_per_micro_batch=1, max_kept_tokens=limit)
    kept = forwarded(learner, sequences[:6])[0]._kept
    assert 2 <= len(kept) < 6 and sum(one.num_tokens for one in kept) <= limit


def test_groups_are_packed_whole_and_split_only_when_too_long() -> None:
    a, b, c = (Prompt(Sample(name, "do it"), (1,) * 4) for name in "abc")
    ids_PG = [[(5,), (5, 6)], [(5, 6), (7,)], [(5,) * 3, (6,) * 3, (7,) * 3]]
    micro_batches = pack_groups([a, b, c], ids_PG, 14)
    # a and b: 4 + 3 each; c: 4 + 3 + 3 + 3 = 13 alone.
    assert [p.members for p in micro_batches] == [
        ((0, 0), (0, 1), (1, 0), (1, 1)),
        ((2, 0), (2, 1), (2, 2)),
    ]
    assert [p.num_tokens for p in micro_batches] == [14, 13]
    cut = pack_groups([a, b, c] * 2, ids_PG * 2, 10, range(3, 6))
    assert [p.members for p in cut] == [
        ((3, 0), (3, 1)), ((4, 0), (4, 1)), ((5, 0), (5, 1)), ((5, 2),),
    ]  # fmt: skip
    assert [p.num_tokens for p in cut] == [7, 7, 10, 7]
    assert [p.num_tokens for p in pack_groups([c], ids_PG[2:], 1)] == [7, 7, 7]
    d_ids = [[(5,) * 3] * 5]  # each part counts the prompt again
    assert [p.num_tokens for p in pack_groups([c], d_ids, 10)] == [10, 10, 7]
    assert cut[2].rows_of([(5, 1)]) == [(c, (6, 6, 6))]
    assert pack_groups([], [], 10) == []


def test_an_iteration_is_split_into_steps_by_groups() -> None:
    assert split_evenly(4, 2) == [range(2), range(2, 4)]
    assert split_evenly(1, 3) == [range(0), range(0), range(1)]
    assert split_evenly(0, 2) == [range(0), range(0)]


def test_an_iteration_without_tokens_takes_no_step(sequences: Sequences) -> None:
    learner = make_learner(KL)
    before = snapshot(learner)
    muted = [replace(s, loss_mask=(False,) * len(s.token_ids)) for s in sequences]
    for sequences in ([], muted):
        (logged,) = train(learner, sequences, 0, 1)
        assert logged["optimizer/steps"] == learner.version == 0
    assert relative_difference(snapshot(learner), before) == 0


def test_learning_rate_follows_the_iteration(reader: Qwen25VL) -> None:
    learner = make_learner(warmup_iterations=2, final_lr_fraction=0.5, learning_rate=1e-3)
    sequences = make_sequences(reader, groups=1, members=2)
    rates = [logged["optimizer/learning_rate"] for logged in train(learner, sequences, 0, 3)]
    assert rates == pytest.approx([5e-4, 1e-3, 1e-3])
    (last,) = train(learner, sequences, NUM_ITERATIONS - 1, NUM_ITERATIONS)
    assert last["optimizer/learning_rate"] == pytest.approx(5e-4)


def test_a_non_finite_gradient_is_skipped_with_a_warning(
    sequences: Sequences, caplog: pytest.LogCaptureFixture
) -> None:
    learner = make_learner()
    train(learner, sequences, 0, 1)
    before, (moments, _) = snapshot(learner), learner.state()
    poisoned = [replace(sequences[0], advantage=math.inf), *sequences[1:]]
    (logged,) = train(learner, poisoned, 1, 2)
    assert (logged["optimizer/steps"], logged["optimizer/skipped_steps"]) == (0, 1)
    assert "optimizer step skipped" in caplog.text
    assert learner.version == 1
    assert relative_difference(snapshot(learner), before) == 0
    assert relative_difference(learner.state()[0], moments) == 0
    (logged,) = train(learner, sequences, 2, 3)
    assert logged["optimizer/steps"] == 1 and math.isfinite(logged["optimizer/grad_norm"])


# --- weights and state ------------------------------------------------------------------------


@pytest.mark.parametrize("num_steps", [8, pytest.param(500, marks=pytest.mark.campaign)])
def test_base_weights_stay_bit_identical_over_exports(num_steps: int) -> None:
    policy = make_policy()
    learner, module = Learner(policy, make_config(), Dist(), NUM_ITERATIONS), policy.module
    frozen = {n: p.detach().clone() for n, p in module.named_parameters() if not p.requires_grad}
    sequence = make_sequences(policy, groups=1, members=1)
    fingerprints = set()
    for _ in range(num_steps):
        update(learner, sequence, 0)
        fingerprints.add(learner.export_weights().fingerprint)
    assert len(fingerprints) == num_steps  # each step exports different weights
    for name, parameter in module.named_parameters():
        assert parameter.requires_grad or torch.equal(parameter, frozen[name]), name


def test_a_loaded_state_continues_bit_for_bit(sequences: Sequences) -> None:
    uninterrupted, resumed = make_learner(), make_learner()
    train(uninterrupted, sequences, 0, 2)
    resumed.load_state(*uninterrupted.state())
    for learner in (uninterrupted, resumed):  # Adam's bias correction needs the number of steps
        train(learner, sequences, 2, 3)
    assert relative_difference(snapshot(resumed), snapshot(uninterrupted)) == 0
    assert resumed.version == uninterrupted.version == 3


def test_the_state_of_another_policy_is_refused() -> None:
    learner = make_learner()
    tensors, meta = learner.state()
    wider = {name: torch.zeros(*t.shape[:-1], t.shape[-1] + 1) for name, t in tensors.items()}
    with pytest.raises(ValueError, match="another shape"):
        learner.load_state(wider, meta)
    with pytest.raises(ValueError, match="1 tensors are missing, unknown"):
        learner.load_state(dict(list(tensors.items())[1:]), meta)


def test_log_probs_do_not_depend_on_the_batch(sequences: Sequences, rows: list[Any]) -> None:
    learner = make_learner(max_tokens_per_micro_batch=10_000)
    together = learner.logprobs(rows)
    assert [len(row) for row in together] == [len(s.token_ids) for s in sequences]
    alone = [learner.logprobs([row])[0] for row in rows]
    for one, other in zip(together, alone, strict=True):
        assert one == pytest.approx(other, abs=FORWARD_TOL)
    assert learner.logprobs([]) == []
