"""One batch of rollouts -> new weights.

What: `Learner`: micro-batches, reference and old log-probs, the loss, the optimiser steps of one
iteration, its metrics, and the weights and state for others to read. What not: the arithmetic
(`algorithm/`), what holds the optimiser's state (`learner_backends.py`, `learner_deepspeed.py`),
rewards and advantages. Called by `train.py`, `sync.py` and the checkpoints.

Two rules hold throughout. Every denominator is counted over all ranks before the first backward, so
that the gradient does not depend on how the batch is split. And every rank runs the same number of
forwards and backwards, empty ones included: ranks gather sharded weights together.

Metrics (each over all ranks; the README says what they mean):
`loss/total`, `loss/policy`, `loss/kl`, `kl/reference_k1`, `kl/reference_k3`, `policy/entropy`,
`policy/clip_fraction`, `policy/ratio_mean`, `policy/ratio_max`, `mismatch/k1`, `mismatch/k3`,
`mismatch/max_abs_dlogp`, `mismatch/ess`, `mismatch/weight_mean`, `mismatch/weight_capped`,
`optimizer/grad_norm`, `optimizer/learning_rate`, `optimizer/steps`, `optimizer/skipped_steps`,
`tokens/trained`, `seconds/learn_reference`, `seconds/learn_forward`, `seconds/learn_backward`,
`seconds/learn_step`.

Axes: `_B` completions of a micro-batch, `_C` completion tokens, right-padded.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from rl.algorithm.importance import effective_sample_share, mismatch
from rl.algorithm.kl import kl_per_token
from rl.algorithm.losses import Denominators
from rl.algorithm.metrics import Metrics
from rl.algorithm.objective import Objective, objective
from rl.algorithm.schedule import learning_rate
from rl.config import RunConfig
from rl.learner_backends import AdamState, Backend, TorchBackend, trainable_parameters
from rl.learner_batches import (
    MicroBatch,
    Row,
    aligned_chunks,
    as_micro_batch,
    shared_filler,
    split_by_group,
)
from rl.types import PolicyWeights, TrainSequence

if TYPE_CHECKING:
    from rl.system.dist import Dist

log = logging.getLogger(__name__)

STATE_PARTS = ("master", "exp_avg", "exp_avg_sq")
"""Prefixes of the checkpoint's tensors: `<part>/<parameter name>`."""


@dataclass
class _Tally:
    """What one iteration adds up before it can be a metric."""

    num_applied: int = 0
    num_skipped: int = 0
    num_tokens: float = 0.0
    weight: float = 0.0
    weight_squared: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def clock(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start


class Learner:
    """Trains `policy.module`. Every method is collective over `dist`."""

    def __init__(self, policy: Any, config: RunConfig, dist: Dist, num_iterations: int) -> None:
        """`policy`: a `contracts.Policy` whose module lies on `dist.device`; with `kl_coeff` > 0
        its `reference()` is a context manager under which the module is the frozen reference.

        Raises ValueError when nothing is trainable or the backend cannot hold it.
        """
        self._policy = policy
        self._config = config
        self._dist = dist
        self._num_iterations = num_iterations
        self._num_steps = 0
        _copy_from_rank_0(trainable_parameters(policy.module), dist)
        self._backend = _make_backend(policy.module, config, dist)

    @property
    def version(self) -> int:
        """Optimiser steps taken so far; skipped ones do not count."""
        return self._num_steps

    def update(self, sequences: Sequence[TrainSequence], iteration: int) -> Metrics:
        """Take the iteration's optimiser steps; returns this rank's metrics.

        Args:
            sequences: this rank's completions, group by group; the members of a group share their
                `Prompt` object. May be empty, on some ranks or on all.
            iteration: 0-based, over the whole run; sets the learning rate.
        """
        config = self._config.optimizer
        metrics, tally = Metrics(), _Tally()
        rate = learning_rate(
            iteration,
            self._num_iterations,
            config.learning_rate,
            config.warmup_iterations,
            config.final_lr_fraction,
        )
        if config.updates_per_iteration > 1:
            sequences = self._with_old_logprobs(sequences)
        filler = shared_filler([(s.prompt, s.token_ids) for s in sequences], self._dist)
        for part in split_by_group(sequences, config.updates_per_iteration):
            denominators = self._count(part)
            if denominators.num_tokens == 0:
                continue
            assert filler is not None
            batches = [
                as_micro_batch(chunk, filler, self._dist.device)
                for chunk in aligned_chunks(part, config.micro_batch_size, self._dist)
            ]
            with tally.clock("learn_reference"):
                references = self._reference_logprobs(batches)
            for batch, reference in zip(batches, references, strict=True):
                self._accumulate(batch, reference, denominators, metrics, tally)
            self._step(rate, metrics, tally)
        metrics.add("optimizer/learning_rate", rate)
        self._report(metrics, tally)
        return metrics

    def _with_old_logprobs(self, sequences: Sequence[TrainSequence]) -> list[TrainSequence]:
        """After the first of several steps the current log-probs are no longer the old ones."""
        missing = [s for s in sequences if s.old_logprobs is None]
        found = iter(self.logprobs([(s.prompt, s.token_ids) for s in missing]))
        return [
            s if s.old_logprobs is not None else replace(s, old_logprobs=tuple(next(found)))
            for s in sequences
        ]

    def _count(self, part: Sequence[TrainSequence]) -> Denominators:
        """What one step is divided by, over all ranks."""
        config = self._config
        num_tokens, num_sequences = self._dist.sum_floats(
            [sum(sum(s.loss_mask) for s in part), sum(any(s.loss_mask) for s in part)]
        )
        planned = config.prompts_per_iteration * config.generations_per_prompt
        return Denominators(
            num_tokens=num_tokens,
            num_sequences=num_sequences,
            num_completions=planned / config.optimizer.updates_per_iteration,
            max_completion_tokens=config.sampling.max_completion_tokens,
        )

    def _accumulate(
        self,
        batch: MicroBatch,
        reference: torch.Tensor | None,
        denominators: Denominators,
        metrics: Metrics,
        tally: _Tally,
    ) -> None:
        """Forward, loss and backward of one micro-batch."""
        tokens = self._policy.collate(batch.rows)
        self._policy.module.train()
        with tally.clock("learn_forward"):
            outputs = self._backend.forward(tokens)
        logprobs = outputs.logprobs.masked_fill(~batch.mask, 0.0)
        old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
        loss = objective(
            self._config.algorithm,
            logprobs,
            old,
            batch.sampler_logprobs,
            reference,
            batch.advantages,
            batch.mask,
            denominators,
        )
        with tally.clock("learn_backward"):
            self._backend.backward(loss.total)
        num_parts = self._config.optimizer.updates_per_iteration
        losses = {"total": loss.total, "policy": loss.policy_loss, "kl": loss.kl_loss}
        for name, value in losses.items():
            metrics.total(f"loss/{name}", float(value.detach()) / num_parts)
        if batch.mask.any():
            self._measure_policy(batch, loss, outputs.entropy, metrics)
            self._measure_mismatch(batch, old, loss.importance, metrics, tally)
            if reference is not None:
                self._measure_kl(batch, logprobs.detach(), reference, metrics)

    def _reference_logprobs(self, batches: Sequence[MicroBatch]) -> list[torch.Tensor | None]:
        """[B, C] of each micro-batch, all under one `reference()`: under full fine-tuning it moves
        a whole model's weights."""
        if not self._config.algorithm.kl_coeff:
            return [None] * len(batches)
        self._policy.module.eval()
        with torch.no_grad(), self._policy.reference():
            return [
                self._backend.forward(self._policy.collate(batch.rows)).logprobs.masked_fill(
                    ~batch.mask, 0.0
                )
                for batch in batches
            ]

    def _step(self, rate: float, metrics: Metrics, tally: _Tally) -> None:
        with tally.clock("learn_step"):
            outcome = self._backend.step(rate)
        if outcome.applied:
            self._num_steps += 1
            tally.num_applied += 1
            metrics.add("optimizer/grad_norm", outcome.grad_norm)
            return
        tally.num_skipped += 1
        if self._dist.rank == 0:
            log.warning(
                "the gradient's norm is %s: optimiser step skipped, weights and moments untouched",
                outcome.grad_norm,
            )

    # --- metrics ------------------------------------------------------------------------------

    def _measure_policy(
        self, batch: MicroBatch, loss: Objective, entropy: torch.Tensor, metrics: Metrics
    ) -> None:
        mask = batch.mask
        ratio = loss.policy.ratio[mask]
        clipped = loss.policy.clipped[mask].float()
        means = torch.stack([entropy[mask].mean(), clipped.mean(), ratio.mean()])
        names = ("entropy", "clip_fraction", "ratio_mean")
        for name, value in zip(names, means.tolist(), strict=True):
            metrics.add(f"policy/{name}", value, ratio.numel())
        metrics.maximum("policy/ratio_max", float(ratio.max()))
        metrics.total("tokens/trained", ratio.numel())

    def _measure_kl(
        self,
        batch: MicroBatch,
        logprobs: torch.Tensor,
        reference: torch.Tensor,
        metrics: Metrics,
    ) -> None:
        for estimator in ("k1", "k3"):
            kl = kl_per_token(logprobs, reference, estimator)[batch.mask]
            metrics.add(f"kl/reference_{estimator}", float(kl.mean()), kl.numel())

    def _measure_mismatch(
        self,
        batch: MicroBatch,
        old: torch.Tensor,
        importance: torch.Tensor,
        metrics: Metrics,
        tally: _Tally,
    ) -> None:
        sums = mismatch(old, batch.sampler_logprobs, batch.mask)
        tally.num_tokens += sums.num_tokens
        tally.weight += sums.weight
        tally.weight_squared += sums.weight_squared
        used = importance[batch.mask]
        capped = (used >= self._config.algorithm.importance_cap).float()
        metrics.add("mismatch/k1", sums.k1 / sums.num_tokens, sums.num_tokens)
        metrics.add("mismatch/k3", sums.k3 / sums.num_tokens, sums.num_tokens)
        metrics.add("mismatch/weight_mean", float(used.mean()), sums.num_tokens)
        metrics.add("mismatch/weight_capped", float(capped.mean()), sums.num_tokens)
        metrics.maximum("mismatch/max_abs_dlogp", sums.max_abs_dlogp)

    def _report(self, metrics: Metrics, tally: _Tally) -> None:
        """Numbers that are the same on every rank, or that need all ranks' sums first."""
        num_tokens, weight, squared = self._dist.sum_floats(
            [tally.num_tokens, tally.weight, tally.weight_squared]
        )
        if num_tokens:
            metrics.add("mismatch/ess", effective_sample_share(num_tokens, weight, squared))
        metrics.maximum("optimizer/steps", tally.num_applied)
        metrics.maximum("optimizer/skipped_steps", tally.num_skipped)
        for phase, seconds in tally.seconds.items():
            metrics.maximum(f"seconds/{phase}", seconds)

    # --- what others read ---------------------------------------------------------------------

    def logprobs(self, rows: Sequence[Row]) -> list[list[float]]:
        """The trainer's log-probs of every completion token of this rank's rows, nats.

        Ranks may bring different numbers of rows, none included.
        """
        self._policy.module.eval()
        filler = shared_filler(rows, self._dist)
        result: list[list[float]] = []
        for chunk in aligned_chunks(rows, self._config.optimizer.micro_batch_size, self._dist):
            assert filler is not None
            with torch.no_grad():
                outputs = self._backend.forward(self._policy.collate(list(chunk) or [filler]))
            values_BC = outputs.logprobs.tolist()[: len(chunk)]
            result += [v[: len(ids)] for v, (_, ids) in zip(values_BC, chunk, strict=True)]
        return result

    def trainable_tensors(self) -> dict[str, torch.Tensor]:
        """The trained weights, whole, float32, keyed as `policy.module.named_parameters()`.

        Detached, but they may alias the live weights: copy what must outlive the next update.
        """
        return self._backend.masters()

    def export_weights(self) -> PolicyWeights:
        """What the sampler must hold now: the weights of the trainer's own forward.

        Float32 masters of a fully trained model, whole, are twice its size, and an engine is awake
        beside them: they are gathered only where ZeRO-3 leaves nothing whole.
        """
        live = trainable_parameters(self._policy.module)
        sharded = any(hasattr(parameter, "ds_id") for parameter in live.values())
        tensors = self.trainable_tensors() if sharded else {n: p.detach() for n, p in live.items()}
        return self._policy.export_weights(tensors, self._num_steps)

    # --- checkpoints --------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Weights and Adam moments under `<part>/<name>`, float32 on the CPU, and JSON-able meta.

        Whole on rank 0, empty on the others. It fits any backend, ZeRO stage and number of ranks.
        The learning rate is a function of the iteration, so no scheduler needs saving.
        """
        state = self._backend.adam_state()
        tensors = {
            f"{part}/{name}": tensor
            for part, named in zip(
                STATE_PARTS, (state.masters, state.exp_avg, state.exp_avg_sq), strict=True
            )
            for name, tensor in named.items()
        }
        return tensors, {"version": self._num_steps}

    def load_state(self, tensors: Mapping[str, torch.Tensor], meta: Mapping[str, Any]) -> None:
        """Continue from what `state()` gave; every rank brings the whole of it.

        Raises ValueError when names or shapes are not this policy's.
        """
        shapes = self._shapes()
        wanted = {f"{part}/{name}" for part in STATE_PARTS for name in shapes}
        strangers = sorted(wanted ^ set(tensors))
        misshapen = sorted(
            key for key in wanted & set(tensors)
            if tensors[key].shape != shapes[key.partition("/")[2]]
        )  # fmt: skip
        if strangers or misshapen:
            raise ValueError(
                f"this checkpoint is of another policy: {len(strangers)} tensors are missing or "
                f"unknown, {len(misshapen)} have another shape (first: "
                f"{(strangers + misshapen)[0]}). Use the config it was written with (same base "
                "model, LoRA rank and targets), or start under a new run_name."
            )
        parts = ({name: tensors[f"{part}/{name}"] for name in shapes} for part in STATE_PARTS)
        self._num_steps = int(meta["version"])
        self._backend.load(AdamState(*parts), self._num_steps)

    def _shapes(self) -> dict[str, torch.Size]:
        return {
            name: getattr(p, "ds_shape", p.shape)
            for name, p in trainable_parameters(self._policy.module).items()
        }


def _copy_from_rank_0(parameters: Mapping[str, torch.nn.Parameter], dist: Dist) -> None:
    """Start all ranks from rank 0's trainable weights, should their random init differ."""
    with torch.no_grad():
        for parameter in parameters.values():
            if dist.rank != 0:
                parameter.zero_()
            dist.sum_(parameter.data)


def _make_backend(module: torch.nn.Module, config: RunConfig, dist: Dist) -> Backend:
    if config.optimizer.backend == "torch":
        return TorchBackend(module, config.optimizer, dist)
    from rl.learner_deepspeed import DeepSpeedBackend

    return DeepSpeedBackend(module, config.optimizer, dist)
