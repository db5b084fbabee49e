"""Collects the metrics of one iteration's learning over micro-batches."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from rl.algorithm.grpo import Objective, effective_sample_share, kl_per_token, mismatch
from rl.algorithm.metrics import Metrics
from rl.api.loss import LossInputs
from rl.ranks.dist import Dist


@dataclass
class LearnerMetrics:
    metrics: Metrics = field(default_factory=Metrics)
    num_applied: int = 0
    num_skipped: int = 0
    num_tokens: float = 0.0
    weight: float = 0.0
    weight_squared: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)
    """Losses of the current step, still divided by the planned denominators."""

    @contextmanager
    def clock(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def measure(
        self,
        inputs: LossInputs,
        loss: Objective,
        reference: torch.Tensor | None,
        entropy: torch.Tensor,
        importance_cap: float,
    ) -> None:
        """Add one micro-batch; `reference`, `entropy`: [B, C] float32, nats."""
        losses = {"total": loss.total, "policy": loss.policy_loss, "kl": loss.kl_loss}
        for name, value in losses.items():
            self.losses[name] = self.losses.get(name, 0.0) + float(value.detach())
        if not inputs.mask.any():
            return
        add, mask = self.metrics.add, inputs.mask
        ratio = loss.policy.ratio[mask]
        clipped = loss.policy.clipped[mask].float()
        means = torch.stack([entropy[mask].mean(), clipped.mean(), ratio.mean()])
        names = ("entropy", "clip_fraction", "ratio_mean")
        for name, mean in zip(names, means.tolist(), strict=True):
            add(f"policy/{name}", mean, ratio.numel())
        self.metrics.maximum("policy/ratio_max", float(ratio.max()))
        self.metrics.total("tokens/trained", ratio.numel())
        sums = mismatch(inputs.old_logprobs, inputs.sampler_logprobs, mask)
        self.num_tokens += sums.num_tokens
        self.weight += sums.weight
        self.weight_squared += sums.weight_squared
        importance = loss.importance[mask]
        capped = (importance >= importance_cap).float()
        add("mismatch/k1", sums.k1 / sums.num_tokens, sums.num_tokens)
        add("mismatch/k3", sums.k3 / sums.num_tokens, sums.num_tokens)
        add("mismatch/weight_mean", float(importance.mean()), sums.num_tokens)
        add("mismatch/weight_capped", float(capped.mean()), sums.num_tokens)
        self.metrics.maximum("mismatch/max_abs_dlogp", sums.max_abs_dlogp)
        if reference is not None:
            for estimator in ("k1", "k3"):
                kl = kl_per_token(inputs.logprobs.detach(), reference, estimator)[mask]
                add(f"kl/reference_{estimator}", float(kl.mean()), kl.numel())

    def close_step(self, gradient_scale: float, num_steps: int) -> None:
        """Add the step's losses, rescaled to true denominators and divided by `num_steps`."""
        for name, value in self.losses.items():
            self.metrics.total(f"loss/{name}", value * gradient_scale / num_steps)
        self.losses.clear()

    def report(self, learning_rate: float, dist: Dist) -> Metrics:
        """All metrics, including those computed from sums over all ranks. Collective."""
        metrics = self.metrics
        metrics.add("optimizer/learning_rate", learning_rate)
        num_tokens, weight, squared = dist.sum_floats(
            [self.num_tokens, self.weight, self.weight_squared]
        )
        if num_tokens:
            metrics.add("mismatch/ess", effective_sample_share(num_tokens, weight, squared))
        metrics.maximum("optimizer/steps", self.num_applied)
        metrics.maximum("optimizer/skipped_steps", self.num_skipped)
        for phase, seconds in self.seconds.items():
            metrics.maximum(f"seconds/{phase}", seconds)
        return metrics
