"""A weight sync that delivers no or wrong weights stops the run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from rl.api.types import Completion, PolicyWeights, Prompt, Sample, SamplingParams
from rl.learner.learner import SyncError, SyncReport, sync

PROBE = Prompt(Sample("s", "do it"), (1, 2))


class Trainer:
    """A learner with a fixed fingerprint and constant log-probs."""

    def __init__(self, fingerprint: str, logprob: float = -1.0) -> None:
        self.fingerprint, self.logprob = fingerprint, logprob

    def export_weights(self) -> PolicyWeights:
        tensors = {"a": torch.zeros(3, 4), "b": torch.zeros(5, dtype=torch.bfloat16)}
        return PolicyWeights("lora", tensors, None, 1, self.fingerprint)

    def logprobs(self, rows: Sequence[Any]) -> list[list[float]]:
        return [[self.logprob] * len(ids) for _, ids in rows]


class Sampler:
    """An engine; a `deaf` one ignores loaded weights, a `blind` one cannot read weights back."""

    def __init__(self, logprob: float = -1.0, deaf: bool = False, blind: bool = False) -> None:
        self.logprob, self.deaf, self.blind = logprob, deaf, blind
        self.held = "other weights in 1 tensors: a"
        self.num_probes = self.num_loads = 0

    def load_weights(self, weights: PolicyWeights) -> None:
        self.num_loads += 1
        if not self.deaf:
            self.held = weights.fingerprint

    def held_fingerprint(self) -> str | None:
        return None if self.blind else self.held

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams, seeds: Sequence[int]
    ) -> list[list[Completion]]:
        self.num_probes += 1
        ids = tuple(range(params.max_tokens))
        member = Completion(ids, (self.logprob,) * len(ids), "length")
        return [[member] * params.num_completions]


def run_sync(sampler: Any, trainer: Any, previous: SyncReport | None = None) -> SyncReport:
    return sync(sampler, trainer, PROBE, "float32", 1.0, previous)


def test_delivered_weights_pass() -> None:
    report = run_sync(Sampler(-1.0004), Trainer("new"))
    assert report.fingerprint == "new" and report.read_back
    assert report.mean_dlogp_nats == pytest.approx(4e-4)


def test_unchanged_weights_are_not_sent_again_but_read_back_again() -> None:
    sampler = Sampler()
    before = run_sync(sampler, Trainer("old"))
    report = run_sync(sampler, Trainer("old"), before)
    assert (report.fingerprint, report.mean_dlogp_nats) == ("old", None)
    assert (sampler.num_loads, sampler.num_probes) == (1, 1)
    sampler.held = "other weights in 1 tensors: lm_head.weight"
    with pytest.raises(SyncError, match=r"lm_head\.weight"):
        run_sync(sampler, Trainer("old"), report)


def test_a_sync_that_changed_nothing_is_an_error() -> None:
    sampler = Sampler()
    before = run_sync(sampler, Trainer("old"))
    sampler.deaf = True
    with pytest.raises(SyncError, match="changed nothing"):
        run_sync(sampler, Trainer("new"), before)
    with pytest.raises(SyncError, match="1 tensors: a"):
        run_sync(Sampler(deaf=True), Trainer("new"))


@pytest.mark.parametrize(
    ("engine_moved", "trainer_moved", "fires"),
    [(0.0, 1e-6, True), (1e-9, 1e-6, False), (0.0, 0.0, False)],
)
def test_an_engine_without_read_back_must_change_with_the_trainer(
    engine_moved: float, trainer_moved: float, fires: bool
) -> None:
    before = run_sync(Sampler(blind=True), Trainer("old"))
    assert not before.read_back
    sampler = Sampler(-1.0 + engine_moved, blind=True)
    with pytest.raises(SyncError, match="moved by 1e-06 nats") if fires else nullcontext():
        run_sync(sampler, Trainer("new", -1.0 + trainer_moved), before)


@pytest.mark.parametrize(("num_moved", "fires"), [(5, True), (4, False)])
def test_an_engine_that_only_reads_back_what_it_was_sent_is_found(
    num_moved: int, fires: bool
) -> None:
    """Its log-probs stay bit-equal while most of the trainer's move. Fewer may be rounding: in
    bfloat16 a small step moves few log-probs, and not the same ones on both sides."""

    class Moved(Trainer):
        def logprobs(self, rows: Sequence[Any]) -> list[list[float]]:
            return [[-1.0 + 1e-6] * num_moved + [-1.0] * (len(ids) - num_moved) for _, ids in rows]

    before = run_sync(Sampler(), Trainer("old"))
    with pytest.raises(SyncError, match="changed nothing") if fires else nullcontext():
        run_sync(Sampler(), Moved("new"), before)


@pytest.mark.parametrize("logprob", [-1.01, float("nan")])
def test_log_probs_that_disagree_are_an_error(logprob: float) -> None:
    with pytest.raises(SyncError, match="does not hold the policy"):
        run_sync(Sampler(logprob), Trainer("new"))
    sync(Sampler(-1.05), Trainer("new"), PROBE, "bfloat16", 1.0)  # bfloat16 may round


class Certain(Sampler):
    """An engine that is nearly certain of all tokens but the last two."""

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams, seeds: object) -> list:
        self.max_tokens = params.max_tokens
        ids = tuple(range(params.max_tokens))
        logprobs = (-1e-4,) * (len(ids) - 2) + (self.logprob,) * 2
        return [[Completion(ids, logprobs, "length")] * params.num_completions]


class CertainTrainer(Trainer):
    def logprobs(self, rows: Sequence[Any]) -> list[list[float]]:
        return [[-1e-4] * (len(ids) - 2) + [self.logprob] * 2 for _, ids in rows]


@pytest.mark.parametrize(("dtype", "apart"), [("float32", 2e-3), ("bfloat16", 0.15)])
@pytest.mark.parametrize("trainer_is_surer", [True, False])
def test_the_least_certain_tokens_are_compared(
    dtype: str, apart: float, trainer_is_surer: bool
) -> None:
    """The mean difference over all tokens is small enough to pass."""
    sampler = Certain(-1.0)
    trainer = CertainTrainer("new", -1.0 + (apart if trainer_is_surer else -apart))
    with pytest.raises(SyncError, match="least certain tokens"):
        sync(sampler, trainer, PROBE, dtype, 1.0)
    sync(sampler, CertainTrainer("new", -1.0), PROBE, dtype, 1.0, max_tokens=5)
    assert sampler.max_tokens == 5, "at most the engine's limit"


def test_a_nan_log_prob_of_one_token_is_an_error() -> None:
    class One(Certain):
        def generate(self, *args: Any) -> list:
            [[first, *others]] = super().generate(*args)
            logprobs = (float("nan"), *first.logprobs[1:])
            return [[replace(first, logprobs=logprobs), *others]]

    with pytest.raises(SyncError, match="nan nats"):
        run_sync(One(), CertainTrainer("new"))
