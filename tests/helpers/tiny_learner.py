"""Training data for a learner on a tiny policy, comparisons of its results, and several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tiny_qwen
import tiny_ranks
import torch
from tiny_rounding import FORWARD_TOL, WEIGHT_TOL
from tiny_run import run_config

from rl.algorithm.metrics import Metrics
from rl.api.policy import Policy
from rl.api.types import Prompt, TrainSequence
from rl.config.schema import RunConfig
from rl.learner import backends
from rl.learner.backends import StepOutcome, TorchBackend
from rl.learner.learner import Learner
from rl.learner.train_step import TrainStep
from rl.policies import trained_module
from rl.ranks.dist import Dist

NUM_ITERATIONS = 10
ADAM_EPS = 1e-4
"""Adam divides by the gradient's size: with a tiny epsilon the rounding noise of a nearly zero
gradient would become a whole step."""
KL = {"kl_coeff": 0.1, "importance_correction": "sequence"}
"""Keys of `algorithm`."""
TOKENS_PER_CHUNK = 2
"""Chunk size in `small_shards_and_chunks`."""


def make_config(
    algorithm: dict[str, Any] | None = None,
    groups: int = 4,
    members: int = 3,
    max_staleness: int = 0,
    **optimizer: Any,
) -> RunConfig:
    """A run config whose `algorithm` and `optimizer` matter for the learner."""
    settings = {"backend": "torch", "learning_rate": 1e-2, "max_tokens_per_micro_batch": 120}
    return run_config(
        num_iterations=NUM_ITERATIONS,
        prompts_per_iteration=groups,
        generations_per_prompt=members,
        sampling={"max_completion_tokens": 12},
        algorithm=algorithm or {},
        optimizer=settings | optimizer,
        max_staleness=max_staleness,
    )


@dataclass(frozen=True, eq=False)
class Graded:
    """A completion with the inputs of its loss; a group's members share their prompt object."""

    prompt: Prompt
    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    advantage: float
    sampler_logprobs: tuple[float, ...]
    counted: bool = True

    @property
    def sequence(self) -> TrainSequence:
        advantage, logprobs = self.advantage, self.sampler_logprobs
        return TrainSequence(self.loss_mask, advantage, logprobs, self.counted, advantage)


def opened(
    learner: Learner, graded: Sequence[Graded], iteration: int = 0
) -> tuple[TrainStep, list[list[Graded]]]:
    """An update on these completions, which has not seen a grade yet, and its groups."""
    groups: dict[Prompt, list[Graded]] = {}
    for each in graded:
        groups.setdefault(each.prompt, []).append(each)
    ids_PG = [[each.token_ids for each in group] for group in groups.values()]
    step = learner.begin(iteration, list(groups), ids_PG, [len(ids_G) for ids_G in ids_PG])
    return step, list(groups.values())


def update(
    learner: Learner, graded: Sequence[Graded], iteration: int, rollout: bool = False
) -> Metrics:
    """Updates on graded completions as the loop does; `rollout`: first runs the rollout's forward,
    as when the renderer is conditioned on hidden states."""
    train_step, groups = opened(learner, graded, iteration)
    if rollout:
        for micro_batch in train_step.micro_batches:
            train_step.forward(micro_batch)
        train_step.work_ahead(lambda: True)
    if train_step.config.max_staleness:
        train_step.compute_old_logprobs()
    for p, group in enumerate(groups):
        train_step.accumulate(p, [each.sequence for each in group])
    return train_step.step()


def merged(metrics: Metrics) -> dict[str, float]:
    return metrics.merge([metrics.state()])


def make_sequences(
    policy: Policy[Any], groups: int = 4, members: int = 3, seed: int = 0
) -> list[Graded]:
    """Random completions of 3 to 9 tokens with random advantages, masks and log-probs."""
    generator = torch.Generator().manual_seed(seed)
    sequences = []
    for group in range(groups):
        prompt = policy.build_prompt(tiny_qwen.sample(group, width=64 + 28 * (group % 2)))
        for _ in range(members):
            length = int(torch.randint(3, 10, (), generator=generator))
            ids = torch.randint(10, 250, (length,), generator=generator).tolist()
            mask = (torch.rand(length, generator=generator) < 0.8).tolist()
            logprobs = (-6 - torch.rand(length, generator=generator)).tolist()
            advantage = float(torch.randn((), generator=generator))
            sequences.append(Graded(prompt, tuple(ids), tuple(mask), advantage, tuple(logprobs)))
    return sequences


def train(
    learner: Learner, sequences: list[Graded], start: int, stop: int, rollout: bool = False
) -> list[dict[str, float]]:
    """Runs iterations start..stop on the same sequences; returns this rank's merged metrics."""
    return [merged(update(learner, sequences, i, rollout)) for i in range(start, stop)]


def snapshot(learner: Learner) -> dict[str, torch.Tensor]:
    """Copies of the trained weights."""
    return {name: t.detach().clone() for name, t in learner.trainable_tensors().items()}


def gradient(
    learner: Learner, sequences: list[Graded], dist: Dist, rollout: bool = False
) -> dict[str, torch.Tensor]:
    """The gradient of an update, summed over ranks, without a step."""
    backend = learner._backend
    assert isinstance(backend, TorchBackend)
    gradients: dict[str, torch.Tensor] = {}

    def catch(learning_rate: float, gradient_scale: float) -> StepOutcome:
        for name, parameter in backend._parameters.items():
            summed = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            gradients[name] = dist.sum_(summed * gradient_scale)
            parameter.grad = None
        return StepOutcome(0.0, applied=False)

    backend.step = catch
    update(learner, sequences, 0, rollout)
    del backend.step
    return gradients


def relative_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Largest |a - b| of all tensors over the largest |b|."""
    assert a.keys() == b.keys()
    largest = max(float(t.abs().max()) for t in b.values())
    return max(float((a[n].double() - b[n].double()).abs().max()) for n in b) / largest


def assert_as_one_process(
    ranks: Sequence[dict[str, Any]], plain: Learner, shares: Sequence[Sequence[Graded]]
) -> None:
    """Each rank's results of two updates on its share ("weights", "logprobs") equal those of
    `plain` on all shares."""
    all_graded = [graded for share in shares for graded in share]
    for iteration in range(2):
        update(plain, all_graded, iteration)
    assert relative_difference(ranks[0]["weights"], ranks[1]["weights"]) == 0
    assert relative_difference(ranks[0]["weights"], snapshot(plain)) <= WEIGHT_TOL
    expected = plain.logprobs([(graded.prompt, graded.token_ids) for graded in all_graded])
    rows = [row for rank in ranks for row in rank["logprobs"]]
    for row, expected_row in zip(rows, expected, strict=True):
        assert row == pytest.approx(expected_row, abs=FORWARD_TOL)


@contextmanager
def small_shards_and_chunks() -> Iterator[None]:
    """Shards all weights and uses chunks of a few tokens, as with a large model and vocabulary."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "PERSISTENCE_THRESHOLD_NUMEL", 0)
        num_logits = TOKENS_PER_CHUNK * 700
        patch.setattr(trained_module.token_logprobs, "__defaults__", (num_logits,))
        yield


def run_ranks(
    function: Callable[..., Any], num_ranks: int, out: Path, **arguments: Any
) -> list[Any]:
    """What `function(dist, **arguments)` returns on each gloo rank; it may return tensors."""
    tiny_ranks.run_ranks(_on_rank, num_ranks, function, out, arguments)
    return [torch.load(out / f"rank{rank}.pt") for rank in range(num_ranks)]


def _on_rank(function: Callable[..., Any], out: Path, arguments: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    dist = Dist.from_env("cpu")
    torch.save(function(dist, **arguments), out / f"rank{dist.rank}.pt")
    dist.gather(None)
    dist.close()
