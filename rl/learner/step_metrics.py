"""Collects the metrics of one iteration's updates over their micro-batches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from rl.algorithm.grpo import Mismatch, Objective, effective_sample_share, kl_per_token, mismatch
from rl.algorithm.metrics import Metrics
from rl.api.loss import LossInputs
from rl.meter import seconds_between, time_mark
from rl.ranks.dist import Dist


def on_device(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Copy a CPU tensor to the device of `like` without waiting for the GPU's earlier work."""
    return tensor.to(like.device, non_blocking=True)


@dataclass
class LearnerMetrics:
    device: str = "cpu"
    metrics: Metrics = field(default_factory=Metrics)
    num_applied: int = 0
    num_skipped: int = 0
    num_tokens: float = 0.0
    weight: float = 0.0
    weight_squared: float = 0.0
    spans: dict[str, list[tuple[Any, Any]]] = field(default_factory=lambda: defaultdict(list))
    """Phase -> the marks (`time_mark`) of its starts and ends."""
    losses: dict[str, float] = field(default_factory=dict)
    """Losses of the current step, still divided by the planned denominators."""
    _measured: list[tuple[list[str], int, torch.Tensor]] = field(default_factory=list)
    """Per micro-batch: names, number of tokens, values (float64, on the device)."""

    @contextmanager
    def clock(self, phase: str) -> Iterator[None]:
        """On a GPU: the time in which it does the work that is queued inside."""
        start = time_mark(self.device)
        yield
        self.spans[phase].append((start, time_mark(self.device)))

    def measure(
        self,
        inputs: LossInputs,
        loss: Objective,
        reference: torch.Tensor | None,
        entropy: torch.Tensor,
        importance_cap: float,
        masks_B: Sequence[Sequence[bool]],
    ) -> None:
        """Add one micro-batch; `reference`, `entropy`: [B, C] float32, nats; `masks_B`: its loss
        masks. The values stay on the device; the host waits for them once per step."""
        values = {
            "loss/total": loss.total, "loss/policy": loss.policy_loss, "loss/kl": loss.kl_loss
        }  # fmt: skip
        tokens_N2 = [
            (b, c) for b, mask in enumerate(masks_B) for c, is_in in enumerate(mask) if is_in
        ]
        if tokens_N2:
            values |= self._token_values(
                inputs, loss, reference, entropy, importance_cap, tokens_N2
            )
        vector = torch.stack([value.detach().double() for value in values.values()])
        self._measured.append((list(values), len(tokens_N2), vector))

    @staticmethod
    def _token_values(
        inputs: LossInputs,
        loss: Objective,
        reference: torch.Tensor | None,
        entropy: torch.Tensor,
        importance_cap: float,
        tokens_N2: Sequence[tuple[int, int]],
    ) -> dict[str, torch.Tensor]:
        """Metric or sum -> its value over the tokens that carry loss, given as (row, column)."""
        rows, columns = on_device(torch.tensor(tokens_N2).T.contiguous(), entropy)
        ratio = loss.policy.ratio[rows, columns]
        importance = loss.importance[rows, columns]
        old, sampler = (x[rows, columns] for x in (inputs.old_logprobs, inputs.sampler_logprobs))
        values = {
            "policy/entropy": entropy[rows, columns].mean(),
            "policy/clip_fraction": loss.policy.clipped[rows, columns].float().mean(),
            "policy/ratio_mean": ratio.mean(),
            "policy/ratio_max": ratio.max(),
            **dict(zip(Mismatch._fields, mismatch(old, sampler), strict=True)),
            "mismatch/weight_mean": importance.mean(),
            "mismatch/weight_capped": (importance >= importance_cap).float().mean(),
        }
        if reference is not None:
            logprobs = inputs.logprobs.detach()
            for estimator in ("k1", "k3"):
                kl = kl_per_token(logprobs, reference, estimator)[rows, columns]
                values[f"kl/reference_{estimator}"] = kl.mean()
        return values

    def _fetch(self) -> None:
        """Fetch the values measured since the last call in one copy; add them to `metrics`."""
        if not self._measured:
            return
        fetched = iter(torch.cat([vector for *_, vector in self._measured]).tolist())
        for names, num_tokens, _ in self._measured:
            values = dict(zip(names, fetched))  # noqa: B905 - values of later micro-batches follow
            for name in ("total", "policy", "kl"):
                self.losses[name] = self.losses.get(name, 0.0) + values.pop(f"loss/{name}")
            if not num_tokens:
                continue
            self.metrics.total("tokens/trained", num_tokens)
            self.num_tokens += num_tokens
            self.metrics.maximum("policy/ratio_max", values.pop("policy/ratio_max"))
            self.metrics.maximum("mismatch/max_abs_dlogp", values.pop("max_abs_dlogp"))
            self.weight += values.pop("weight")
            self.weight_squared += values.pop("weight_squared")
            for estimator in ("k1", "k3"):
                values[f"mismatch/{estimator}"] = values.pop(estimator) / num_tokens
            for name, value in values.items():
                self.metrics.add(name, value, num_tokens)
        self._measured.clear()

    def add_rise(self, products: Sequence[float], dist: Dist) -> None:
        """Add `policy/rise` and its standard error. `products`: nats, one per completion of this
        rank whose reward differs from its group's mean. Collective."""
        total, squares, num = dist.sum_floats(
            [sum(products), sum(x * x for x in products), len(products)]
        )
        if num > 1:
            mean = total / num
            variance = max(0.0, squares / num - mean**2)
            self.metrics.maximum("policy/rise", mean)
            self.metrics.maximum("policy/rise_error", (variance / (num - 1)) ** 0.5)

    def close_step(self, gradient_scale: float, num_steps: int) -> None:
        """Add the step's losses, rescaled to true denominators and divided by `num_steps`."""
        self._fetch()
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
        for phase, spans in self.spans.items():
            metrics.maximum(f"seconds/{phase}", sum(seconds_between(*span) for span in spans))
        return metrics
