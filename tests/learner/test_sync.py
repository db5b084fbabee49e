"""A weight sync that delivers nothing, or the wrong thing, stops the run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from rl.api.types import Completion, PolicyWeights, Prompt, Sample, SamplingParams
from rl.learner.weight_sync import SyncError, sync

PROBE = Prompt(Sample("s", "do it"), (1, 2))


class Trainer:
    """A learner whose weights are named by a word and whose log-probs are constant."""

    def __init__(self, fingerprint: str) -> None:
        self.fingerprint = fingerprint

    def export_weights(self) -> PolicyWeights:
        tensors = {"a": torch.zeros(3, 4), "b": torch.zeros(5, dtype=torch.bfloat16)}
        return PolicyWeights("lora", tensors, None, 1, self.fingerprint)

    def logprobs(self, rows: Sequence[Any]) -> list[list[float]]:
        return [[-1.0] * len(ids) for _, ids in rows]


class Sampler:
    """An engine; `deaf` ones ignore what they are given."""

    def __init__(self, logprob: float = -1.0, deaf: bool = False, held: str | None = "old") -> None:
        self.logprob, self.deaf, self.held = logprob, deaf, held
        self.num_probes = 0

    def load_weights(self, weights: PolicyWeights) -> None:
        if not self.deaf:
            self.held = weights.fingerprint

    def held_fingerprint(self) -> str | None:
        return self.held

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams, seeds: Sequence[int]
    ) -> list[list[Completion]]:
        self.num_probes += 1
        ids = tuple(range(params.max_tokens))
        member = Completion(ids, (self.logprob,) * len(ids), "length")
        return [[member] * params.num_completions]


def test_delivered_weights_pass() -> None:
    report = sync(Sampler(-1.0004), Trainer("new"), PROBE, "float32", "old", 1.0)
    assert report.fingerprint == "new"
    assert report.mean_dlogp_nats == pytest.approx(4e-4)


def test_weights_that_no_step_has_changed_are_not_sent_again() -> None:
    sampler = Sampler(deaf=True)
    report = sync(sampler, Trainer("old"), PROBE, "float32", "old", 1.0)
    assert (report.fingerprint, report.mean_dlogp_nats) == ("old", None)
    assert sampler.num_probes == 0


def test_a_sync_that_changed_nothing_is_an_error() -> None:
    with pytest.raises(SyncError, match="changed nothing"):
        sync(Sampler(deaf=True), Trainer("new"), PROBE, "float32", "old", 1.0)


@pytest.mark.parametrize("logprob", [-1.01, float("nan")])
def test_log_probs_that_disagree_are_an_error(logprob: float) -> None:
    with pytest.raises(SyncError, match="does not hold the policy"):
        sync(Sampler(logprob), Trainer("new"), PROBE, "float32", "old", 1.0)


def test_bfloat16_engines_may_round() -> None:
    sync(Sampler(-1.05), Trainer("new"), PROBE, "bfloat16", "old", 1.0)
