"""One iteration's learning, done as far as it can be at any moment.

The forwards the rollout conditions the renderer with, kept for the backward where that is exact;
reference log-probs and forwards while the judge still reads; the backward of a micro-batch as soon
as its groups are graded; the optimiser steps.

Three rules. The gradient does not depend on how the batch is split: a loss is divided by what was
PLANNED before the judge spoke, which counts all ranks, and the step corrects by one factor for what
was really graded. Backwards run in the order of the micro-batches and over the same rows, however
soon verdicts come in: floats do not commute. And where ranks go in step (`backend.in_step`),
each does as many forwards and backwards as the others, empty ones included.

Axes: `_P` prompts on this rank, `_G` completions of a prompt, `_B` rows of a micro-batch, `_C`
completion tokens, right-padded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import chain

import torch

from rl.algorithm.grpo import loss_named, objective
from rl.algorithm.metrics import Metrics
from rl.api.loss import Denominators, divisor
from rl.api.policy import Policy
from rl.api.types import TokenBatch, TokenOutputs, TrainSequence
from rl.config.schema import RunConfig
from rl.learner.backends import Backend
from rl.learner.loss_inputs import loss_inputs, pad
from rl.learner.metrics import LearnerMetrics
from rl.learner.micro_batches import FILLER, Member, MicroBatch, by_member
from rl.ranks.dist import Dist

log = logging.getLogger(__name__)

RowsOf = Callable[[MicroBatch], Sequence[Member]]
"""Which of a micro-batch's rows."""


@dataclass(eq=False)
class Minibatch:
    """The micro-batches of one optimiser step."""

    micro_batches: list[MicroBatch]
    planned: Denominators
    """Of all its completions, over all ranks, as if every one were graded."""
    num_done: int = 0
    """Those whose backward is over."""


@dataclass(frozen=True, eq=False)
class Kept:
    """A forward with its graph."""

    members: tuple[Member, ...]
    """Of the rows it ran over."""
    logprobs: torch.Tensor
    """[B, C] float32, nats, with gradient."""
    entropy: torch.Tensor
    """[B, C] float32, nats."""


@dataclass(eq=False)
class TrainStep:
    """See `micro-batches.Forwards` for what the rollout reads of it."""

    policy: Policy
    backend: Backend
    config: RunConfig
    dist: Dist
    learning_rate: float
    group_sizes: Sequence[int]
    """Of each group, those that may be trained: the bare arm's come behind them."""
    minibatches: list[Minibatch]
    """In the order of the steps; the first runs under the weights that the rollout ran under."""
    keeps_graphs: bool
    """Whether a backward through the rollout's forward is exact here."""
    collective: bool
    """Whether a forward needs every rank in it (ZeRO-3)."""
    on_step: Callable[[], None]
    """Called after each optimiser step that was applied."""
    stepping: Callable[[], AbstractContextManager[None]]
    """Around each optimiser step."""
    _kept: dict[MicroBatch, Kept] = field(default_factory=dict)
    _num_kept_tokens: int = 0
    _old: dict[Member, list[float]] = field(default_factory=dict)
    """Log-probs under the rollout's weights, nats."""
    _reference: dict[Member, list[float]] = field(default_factory=dict)
    _sequences: dict[Member, TrainSequence] = field(default_factory=dict)
    _accumulated: set[int] = field(default_factory=set)
    _learner_metrics: LearnerMetrics = field(default_factory=LearnerMetrics)

    @property
    def micro_batches(self) -> list[MicroBatch]:
        """All of them, in order, fillers included."""
        return list(chain.from_iterable(m.micro_batches for m in self.minibatches))

    def states(self, micro_batch: MicroBatch) -> tuple[TokenBatch, TokenOutputs]:
        """See `Forwards`. Where the renderer's are not those of the rows, these are left to
        `prefetch_reference`: they bring nothing to a picture."""
        batch = self.policy.collate_states(micro_batch.rows)
        if batch is None:
            return self.forward(micro_batch)
        self.policy.module.eval()
        with torch.no_grad():
            return batch, self.backend.forward(batch)

    def forward(self, micro_batch: MicroBatch) -> tuple[TokenBatch, TokenOutputs]:
        """Of all the micro-batch's rows, in the rollout; its graph stays where it can be used."""
        keep = self._has_room(micro_batch)
        batch, outputs = self._run(micro_batch, micro_batch.members, keep)
        if self._is_stale(self._minibatch_of(micro_batch)):
            self._old.update(by_member(micro_batch, micro_batch.members, outputs))
        return batch, outputs

    def prefetch_reference(self, still_waiting: Callable[[], bool]) -> None:
        """What needs no reward: reference log-probs, and the forwards that no rollout asked for.

        Stops between two micro-batches once nothing is waited for any more: by then it is known
        which groups teach nothing and need neither.
        """
        if self.collective:
            return
        for micro_batch in self.minibatches[0].micro_batches:
            if not still_waiting():
                return
            members = self._trainable(micro_batch)
            if micro_batch not in self._kept and members and self._has_room(micro_batch):
                self._run(micro_batch, members, keep=True)
        self._find_reference(self.micro_batches, self._trainable, still_waiting)

    def note_old_logprobs(self) -> None:
        """Log-probs under the rollout's weights, which are about to move, where no forward of the
        rollout has given them. Collective where forwards are."""
        self._find_old(self.micro_batches, self._rows_to_read)

    def accumulate(self, p: int, sequences_G: Sequence[TrainSequence | None]) -> None:
        """What prompt p's graded completions bring, None for those that bring nothing.

        Runs the backward of every micro-batch that is now complete, unless ranks have to do it
        together.
        """
        for g, sequence in enumerate(sequences_G):
            if sequence is not None and any(sequence.loss_mask):
                self._sequences[p, g] = sequence
        self._accumulated.add(p)
        if self.backend.in_step:
            return
        minibatch = self.minibatches[0]
        for micro_batch in minibatch.micro_batches[minibatch.num_done :]:
            live = self._live(micro_batch)
            if not all(p in self._accumulated for p, _ in micro_batch.members):
                return
            if not self._reference_known(live):
                return
            if live:
                self._backward(minibatch, micro_batch)
            self._kept.pop(micro_batch, None)
            minibatch.num_done += 1

    def step(self) -> Metrics:
        """Everything that is left, and the optimiser steps. Every group has been handed in.

        Returns this rank's metrics. Collective.
        """
        needed = self._needed()
        stale = [m for m in self.micro_batches if self._is_stale(self._minibatch_of(m))]
        self._find_old([m for m in stale if m in needed], self._rows_to_train)
        for minibatch in self.minibatches:
            actual = self._count(minibatch)
            if actual.num_tokens == 0:
                continue
            rest = minibatch.micro_batches[minibatch.num_done :]
            self._find_reference([m for m in rest if m in needed], self._rows_to_read)
            for micro_batch in rest:
                if micro_batch in needed:
                    self._backward(minibatch, micro_batch)
                self._kept.pop(micro_batch, None)
            loss = loss_named(self.config.algorithm.loss)
            self._optimizer_step(divisor(loss, minibatch.planned) / divisor(loss, actual))
        self._kept.clear()
        return self._learner_metrics.report(self.learning_rate, self.dist)

    def _trainable(self, micro_batch: MicroBatch) -> tuple[Member, ...]:
        """All but the bare arm's and fillers."""
        return tuple((p, g) for p, g in micro_batch.members if p >= 0 and g < self.group_sizes[p])

    def _live(self, micro_batch: MicroBatch) -> tuple[Member, ...]:
        """Those that carry loss."""
        return tuple(member for member in micro_batch.members if member in self._sequences)

    def _rows_to_read(self, micro_batch: MicroBatch) -> tuple[Member, ...]:
        """Those that may be trained; one that is not where a micro-batch has none."""
        return self._trainable(micro_batch) or micro_batch.members[:1]

    def _rows_to_train(self, micro_batch: MicroBatch) -> tuple[Member, ...]:
        """Those that carry loss; one that carries none where only other ranks' do. All that may,
        where a slow judge leaves time to forward them ahead: the sums must not tell how slow."""
        live = self._live(micro_batch)
        if live and self._may_be_kept(micro_batch):
            return self._trainable(micro_batch)
        return live or self._rows_to_read(micro_batch)[:1]

    def _minibatch_of(self, micro_batch: MicroBatch) -> Minibatch:
        return next(m for m in self.minibatches if micro_batch in m.micro_batches)

    def _is_stale(self, minibatch: Minibatch) -> bool:
        """Whether weights will have moved between the rollout and its backward."""
        return self.config.max_staleness > 0 or minibatch is not self.minibatches[0]

    def _needed(self) -> set[MicroBatch]:
        """Those that a backward must run for: on this rank, or on any where ranks are in step."""
        micro_batches = self.micro_batches
        live = [float(bool(self._live(micro_batch))) for micro_batch in micro_batches]
        if self.backend.in_step:
            live = self.dist.sum_floats(live)
        return {micro_batch for micro_batch, some in zip(micro_batches, live, strict=True) if some}

    def _count(self, minibatch: Minibatch) -> Denominators:
        """What the step is really divided by, over all ranks: what is counted, or, where nothing
        is, all that carries loss."""
        members = list(chain.from_iterable(map(self._live, minibatch.micro_batches)))
        live = [self._sequences[member] for member in members]
        counted = [sequence for sequence in live if sequence.counted]
        sums = [(sum(sum(s.loss_mask) for s in found), len(found)) for found in (counted, live)]
        totals = self.dist.sum_floats([number for pair in sums for number in pair])
        num_tokens, num_sequences = totals[:2] if totals[0] else totals[2:]
        return replace(minibatch.planned, num_tokens=num_tokens, num_sequences=num_sequences)

    def _may_be_kept(self, micro_batch: MicroBatch, num_kept_tokens: int = 0) -> bool:
        """Whether its graph may stay until the rewards are there, beside so many others."""
        limit = self.config.optimizer.max_kept_tokens
        return (
            self.keeps_graphs
            and not self._is_stale(self._minibatch_of(micro_batch))
            and FILLER not in micro_batch.members
            and (limit is None or num_kept_tokens + micro_batch.num_tokens <= limit)
        )

    def _has_room(self, micro_batch: MicroBatch) -> bool:
        return self._may_be_kept(micro_batch, self._num_kept_tokens)

    def _run(
        self, micro_batch: MicroBatch, members: Sequence[Member], keep: bool
    ) -> tuple[TokenBatch, TokenOutputs]:
        """Forward some of a micro-batch's rows, with a graph if it is kept."""
        batch = self.policy.collate(micro_batch.rows_of(members))
        self.policy.module.train(keep)
        with torch.set_grad_enabled(keep):
            outputs = self.backend.forward(batch)
        if keep:
            self._kept[micro_batch] = Kept(tuple(members), outputs.logprobs, outputs.entropy)
            self._num_kept_tokens += micro_batch.num_tokens
        return batch, outputs

    def _logprobs_of(
        self, micro_batch: MicroBatch, members: Sequence[Member]
    ) -> dict[Member, list[float]]:
        """[T] of some of a micro-batch's rows, without a graph, the module in evaluation mode."""
        _, outputs = self._run(micro_batch, members, keep=False)
        return by_member(micro_batch, members, outputs)

    def _find_old(self, micro_batches: Sequence[MicroBatch], rows_of: RowsOf) -> None:
        """Log-probs under the weights of now. Which are missing is settled first: a filler's are
        known after its first forward, and ranks would fall out of step."""
        wanted = [(micro_batch, rows_of(micro_batch)) for micro_batch in micro_batches]
        missing = [(m, members) for m, members in wanted if not self._old.keys() >= {*members}]
        for micro_batch, members in missing:
            self._old.update(self._logprobs_of(micro_batch, members))

    def _find_reference(
        self,
        micro_batches: Sequence[MicroBatch],
        rows_of: RowsOf,
        still_waiting: Callable[[], bool] = lambda: True,
    ) -> None:
        """Under one `reference()`: with full fine-tuning it moves a whole model's weights."""
        if not self.config.algorithm.kl_coeff:
            return
        wanted = [(micro_batch, rows_of(micro_batch)) for micro_batch in micro_batches]
        missing = [w for w in wanted if self.collective or not self._reference_known(w[1])]
        if not missing:
            return
        with self._learner_metrics.clock("learn_reference"), self.policy.reference():
            for micro_batch, members in missing:
                if not still_waiting():
                    return
                self._reference.update(self._logprobs_of(micro_batch, members))

    def _reference_known(self, members: Sequence[Member]) -> bool:
        return not self.config.algorithm.kl_coeff or self._reference.keys() >= {*members}

    def _backward(self, minibatch: Minibatch, micro_batch: MicroBatch) -> None:
        """Forward unless one was kept, loss, backward."""
        kept = self._kept.pop(micro_batch, None)
        if kept is None:
            members = self._rows_to_train(micro_batch)
            self.policy.module.train()
            with self._learner_metrics.clock("learn_forward"):
                outputs = self.backend.forward(self.policy.collate(micro_batch.rows_of(members)))
            kept = Kept(members, outputs.logprobs, outputs.entropy)
        rows = micro_batch.rows_of(kept.members)
        algorithm = self.config.algorithm

        def values_of(found: Mapping[Member, list[float]]) -> list[list[float]]:
            members = zip(kept.members, rows, strict=True)
            return [found.get(member, [0.0] * len(ids)) for member, (_, ids) in members]

        inputs = loss_inputs(
            algorithm,
            rows,
            [self._sequences.get(member) for member in kept.members],
            kept.logprobs,
            values_of(self._old) if self._is_stale(minibatch) else None,
            minibatch.planned,
        )
        reference = None
        if algorithm.kl_coeff:
            reference = pad(values_of(self._reference), torch.float32, kept.logprobs.device)
            reference = reference.masked_fill(~inputs.mask, 0.0)
        loss = objective(algorithm, inputs, reference)
        with self._learner_metrics.clock("learn_backward"):
            self.backend.backward(loss.total)
        self._learner_metrics.measure(
            inputs, loss, reference, kept.entropy, algorithm.importance_cap
        )

    def _optimizer_step(self, gradient_scale: float) -> None:
        with self._learner_metrics.clock("learn_step"), self.stepping():
            outcome = self.backend.step(self.learning_rate, gradient_scale)
        self._learner_metrics.close_step(gradient_scale, len(self.minibatches))
        if outcome.applied:
            self.on_step()
            self._learner_metrics.num_applied += 1
            self._learner_metrics.metrics.add("optimizer/grad_norm", outcome.grad_norm)
            return
        self._learner_metrics.num_skipped += 1
        if self.dist.rank == 0:
            log.warning(
                "the gradient's norm is %s: optimiser step skipped, weights and moments untouched",
                outcome.grad_norm,
            )
