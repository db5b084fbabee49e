"""A weight sync that delivers no or wrong weights stops the run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from rl.api.types import Completion, PolicyWeights, Prompt, Sample, SamplingParams
from rl.learner.learner import SyncError, SyncReport, sync

PROBE = Prompt(Sample("s", "do it"), (1, 2))


LogProbs = Callable[[int], list[float]]
"""From the number of tokens."""


def each(logprob: float) -> LogProbs:
    return lambda num_tokens: [logprob] * num_tokens


def certain(logprob: float, first: float = -1e-4) -> LogProbs:
    """Nearly 0 for all tokens but the last two."""
    return lambda num_tokens: [first, *[-1e-4] * (num_tokens - 3), logprob, logprob]


STILL = each(-1.0)


class Trainer:
    """A learner with a fixed fingerprint and fixed log-probs."""

    def __init__(self, fingerprint: str, of: LogProbs = STILL) -> None:
        self.fingerprint, self.of = fingerprint, of

    def export_weights(self) -> PolicyWeights:
        tensors = {"a": torch.zeros(3, 4), "b": torch.zeros(5, dtype=torch.bfloat16)}
        return PolicyWeights("lora", tensors, None, 1, self.fingerprint)

    def logprobs(self, rows: Sequence[Any]) -> list[list[float]]:
        return [self.of(len(ids)) for _, ids in rows]


class Sampler:
    """An engine; a `deaf` one ignores loaded weights, a `blind` one cannot read weights back."""

    def __init__(self, of: LogProbs = STILL, deaf: bool = False, blind: bool = False) -> None:
        self.of, self.deaf, self.blind = of, deaf, blind
        self.held = "other weights in 1 tensors: a"
        self.num_loads = 0
        self.probed: list[int] = []

    def load_weights(self, weights: PolicyWeights) -> None:
        self.num_loads += 1
        if not self.deaf:
            self.held = weights.fingerprint

    def held_fingerprint(self) -> str | None:
        return None if self.blind else self.held

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams, seeds: Sequence[int]
    ) -> list[list[Completion]]:
        num_tokens = params.max_tokens
        self.probed.append(num_tokens)
        member = Completion(tuple(range(num_tokens)), tuple(self.of(num_tokens)), "length")
        return [[member] * params.num_completions]


def run_sync(sampler: Any, trainer: Any, previous: SyncReport | None = None) -> SyncReport:
    return sync(sampler, trainer, PROBE, "float32", 1.0, previous)


def test_delivered_weights_pass() -> None:
    report = run_sync(Sampler(each(-1.0004)), Trainer("new"))
    assert report.fingerprint == "new" and report.read_back
    assert report.mean_dlogp_nats == pytest.approx(4e-4)


def test_unchanged_weights_are_not_sent_again_but_read_back_again() -> None:
    sampler = Sampler()
    before = run_sync(sampler, Trainer("old"))
    report = run_sync(sampler, Trainer("old"), before)
    assert (report.fingerprint, report.mean_dlogp_nats) == ("old", None)
    assert (sampler.num_loads, len(sampler.probed)) == (1, 1)
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
    sampler = Sampler(each(-1.0 + engine_moved), blind=True)
    with pytest.raises(SyncError, match="moved by 1e-06 nats") if fires else nullcontext():
        run_sync(sampler, Trainer("new", each(-1.0 + trainer_moved)), before)


@pytest.mark.parametrize(("num_moved", "fires"), [(5, True), (4, False)])
def test_an_engine_that_only_reads_back_what_it_was_sent_is_found(
    num_moved: int, fires: bool
) -> None:
    """Its log-probs stay bit-equal while most of the trainer's move. Fewer may be rounding: in
    bfloat16 a small step moves few log-probs, and not the same ones on both sides."""

    def moved(num_tokens: int) -> list[float]:
        return [-1.0 + 1e-6] * num_moved + [-1.0] * (num_tokens - num_moved)

    before = run_sync(Sampler(), Trainer("old"))
    with pytest.raises(SyncError, match="changed nothing") if fires else nullcontext():
        run_sync(Sampler(), Trainer("new", moved), before)


@pytest.mark.parametrize(
    ("engine", "trainer", "part"),
    [
        (each(-1.01), STILL, "does not hold the policy"),
        (each(math.nan), STILL, "does not hold the policy"),
        (certain(-1.0, first=math.nan), certain(-1.0), "nan nats"),  # of one token
    ],
)
def test_log_probs_that_disagree_are_an_error(
    engine: LogProbs, trainer: LogProbs, part: str
) -> None:
    with pytest.raises(SyncError, match=part):
        run_sync(Sampler(engine), Trainer("new", trainer))
    sync(Sampler(each(-1.05)), Trainer("new"), PROBE, "bfloat16", 1.0)  # bfloat16 may round


@pytest.mark.parametrize(("dtype", "apart"), [("float32", 2e-3), ("bfloat16", 0.15)])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_least_certain_tokens_are_compared(dtype: str, apart: float, sign: int) -> None:
    """The mean difference over all tokens is small enough to pass."""
    sampler = Sampler(certain(-1.0))
    with pytest.raises(SyncError, match="least certain tokens"):
        sync(sampler, Trainer("new", certain(-1.0 + sign * apart)), PROBE, dtype, 1.0)
    sync(sampler, Trainer("new", certain(-1.0)), PROBE, dtype, 1.0, max_tokens=5)
    assert sampler.probed[-1] == 5, "at most the engine's limit"
