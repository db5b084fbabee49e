"""One iteration's learning, done as far as it can be at any moment.

What: `Update`: the forwards the rollout conditions the renderer with, kept for the backward where
that is exact; reference log-probs and forwards while the judge still reads; the backward of a pack
as soon as its groups are graded; the optimiser steps. What not: the arithmetic (`algorithm/`), what
holds the optimiser's state (`backends.py`), rewards and advantages. Made by
`Learner.begin`, driven by the rollout and by `train.py`.

Three rules. The gradient does not depend on how the batch is split: a loss is divided by what was
PLANNED before the judge spoke, which counts all ranks, and the step corrects by one factor for what
was really graded. Backwards run in the order of the packs and over the same rows, however soon
verdicts come in: floats do not commute. And where ranks work together (`backend.in_step`), each
does as many forwards and backwards as the others, empty ones included.

Axes: `_P` prompts on this rank, `_G` completions of a prompt, `_B` rows of a pack, `_C` completion
tokens, right-padded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from rl.algorithm.losses import Denominators, divisor
from rl.algorithm.metrics import Metrics
from rl.algorithm.objective import objective
from rl.api.types import TokenBatch, TokenOutputs, TrainSequence
from rl.config.schema import RunConfig
from rl.learner.backends import Backend
from rl.learner.loss_inputs import loss_inputs, pad
from rl.learner.metrics import Tally
from rl.learner.micro_batches import FILLER, Member, Pack

if TYPE_CHECKING:
    from rl.ranks.dist import Dist

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Part:
    """The packs of one optimiser step."""

    packs: list[Pack]
    planned: Denominators
    """Of all its completions, over all ranks, as if every one were graded."""
    num_done: int = 0
    """Packs whose backward is over."""


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
class Update:
    """See `packs.Forwards` for what the rollout reads of it."""

    policy: Any
    backend: Backend
    config: RunConfig
    dist: Dist
    learning_rate: float
    group_sizes: Sequence[int]
    """Of each group, those that may be trained: the baseline arm's come behind them."""
    parts: list[Part]
    """In the order of the steps; the first runs under the weights that the rollout ran under."""
    keeps_graphs: bool
    """Whether a backward through the rollout's forward is exact here."""
    collective: bool
    """Whether a forward needs every rank in it (ZeRO-3)."""
    on_step: Callable[[], None]
    """Called after each optimiser step that was applied."""
    _kept: dict[Pack, Kept] = field(default_factory=dict)
    _num_kept_tokens: int = 0
    _old: dict[Member, list[float]] = field(default_factory=dict)
    """Log-probs under the rollout's weights, nats."""
    _reference: dict[Member, list[float]] = field(default_factory=dict)
    _sequences: dict[Member, TrainSequence] = field(default_factory=dict)
    _handed_in: set[int] = field(default_factory=set)
    _tally: Tally = field(default_factory=Tally)

    @property
    def packs(self) -> list[Pack]:
        """All of them, in order, fillers included."""
        return [pack for part in self.parts for pack in part.packs]

    # --- while the rollout goes on ------------------------------------------------------------

    def forward(self, pack: Pack) -> tuple[TokenBatch, TokenOutputs]:
        """Of all the pack's rows, for the rollout; its graph stays where it can be used."""
        keep = self._has_room(pack)
        batch, outputs = self._run(pack, pack.members, keep)
        if self._is_stale(self._part_of(pack)):
            self._old.update(_by_member(pack, pack.members, outputs))
        return batch, outputs

    def work_ahead(self, still_waiting: Callable[[], bool]) -> None:
        """What needs no reward: reference log-probs, and the forwards that no rollout asked for.

        Stops between two packs once nothing is waited for any more: by then it is known which
        groups teach nothing and need neither.
        """
        if self.collective:
            return
        for pack in self.parts[0].packs:
            if not still_waiting():
                return
            members = self._trainable(pack)
            if pack not in self._kept and members and self._has_room(pack):
                self._run(pack, members, keep=True)
        self._find_reference([(pack, self._trainable(pack)) for pack in self.packs], still_waiting)

    def note_old(self) -> None:
        """Log-probs under the rollout's weights, which are about to move, where no forward of the
        rollout has given them. Collective where forwards are."""
        self._find_old([(pack, self._rows_to_read(pack)) for pack in self.packs])

    def hand_in(self, p: int, sequences_G: Sequence[TrainSequence | None]) -> None:
        """What prompt p's graded completions bring, None for those that bring nothing.

        Runs the backward of every pack that is now complete, unless ranks have to do it together.
        A group that is handed in again is known already.
        """
        if p in self._handed_in:
            return
        for g, sequence in enumerate(sequences_G):
            if sequence is not None and any(sequence.loss_mask):
                self._sequences[p, g] = sequence
        self._handed_in.add(p)
        if self.backend.in_step:
            return
        part = self.parts[0]
        for pack in part.packs[part.num_done :]:
            live = self._live(pack)
            if not all(p in self._handed_in for p, _ in pack.members):
                return
            if not self._reference_known(live):
                return
            if live:
                self._backward(part, pack)
            self._kept.pop(pack, None)
            part.num_done += 1

    def finish(self) -> Metrics:
        """Everything that is left, and the optimiser steps. Every group has been handed in.

        Returns this rank's metrics. Collective.
        """
        needed = self._needed()
        later = [pack for part in self.parts if self._is_stale(part) for pack in part.packs]
        self._find_old([(pack, self._rows_to_train(pack)) for pack in later if pack in needed])
        for part in self.parts:
            actual = self._count(part)
            if actual.num_tokens == 0:
                continue
            rest = part.packs[part.num_done :]
            self._find_reference(
                [(pack, self._rows_to_read(pack)) for pack in rest if pack in needed]
            )
            for pack in rest:
                if pack in needed:
                    self._backward(part, pack)
                self._kept.pop(pack, None)
            loss = self.config.algorithm.loss
            self._step(divisor(loss, part.planned) / divisor(loss, actual))
        self._kept.clear()
        return self._tally.report(self.learning_rate, self.dist)

    # --- which rows ---------------------------------------------------------------------------

    def _trainable(self, pack: Pack) -> tuple[Member, ...]:
        """All but the baseline arm's and fillers."""
        return tuple((p, g) for p, g in pack.members if p >= 0 and g < self.group_sizes[p])

    def _live(self, pack: Pack) -> tuple[Member, ...]:
        """Those that carry loss."""
        return tuple(member for member in pack.members if member in self._sequences)

    def _rows_to_read(self, pack: Pack) -> tuple[Member, ...]:
        """Those that may be trained; one that is not where a pack has none."""
        return self._trainable(pack) or pack.members[:1]

    def _rows_to_train(self, pack: Pack) -> tuple[Member, ...]:
        """Those that carry loss; one that carries none where only other ranks' do. All that may,
        where a slow judge leaves time to forward them ahead: the sums must not tell how slow."""
        live = self._live(pack)
        if live and self._may_be_kept(pack):
            return self._trainable(pack)
        return live or self._rows_to_read(pack)[:1]

    def _part_of(self, pack: Pack) -> Part:
        return next(part for part in self.parts if pack in part.packs)

    def _is_stale(self, part: Part) -> bool:
        """Whether weights will have moved between the rollout and this part's backward."""
        return self.config.max_staleness > 0 or part is not self.parts[0]

    def _needed(self) -> set[Pack]:
        """Packs that a backward must run for: on this rank, or on any where ranks are in step."""
        packs = self.packs
        live = [float(bool(self._live(pack))) for pack in packs]
        if self.backend.in_step:
            live = self.dist.sum_floats(live)
        return {pack for pack, some in zip(packs, live, strict=True) if some}

    def _count(self, part: Part) -> Denominators:
        """What the step is really divided by, over all ranks."""
        members = [member for pack in part.packs for member in self._live(pack)]
        num_tokens, num_sequences = self.dist.sum_floats(
            [sum(sum(self._sequences[member].loss_mask) for member in members), len(members)]
        )
        return Denominators(
            num_tokens,
            num_sequences,
            part.planned.num_completions,
            part.planned.max_completion_tokens,
        )

    # --- forwards -----------------------------------------------------------------------------

    def _may_be_kept(self, pack: Pack, num_kept_tokens: int = 0) -> bool:
        """Whether its graph may stay until the rewards are there, beside so many others."""
        limit = self.config.optimizer.max_kept_tokens
        if not self.keeps_graphs or self._is_stale(self._part_of(pack)) or FILLER in pack.members:
            return False
        return limit is None or num_kept_tokens + pack.num_tokens <= limit

    def _has_room(self, pack: Pack) -> bool:
        return self._may_be_kept(pack, self._num_kept_tokens)

    def _run(
        self, pack: Pack, members: Sequence[Member], keep: bool
    ) -> tuple[TokenBatch, TokenOutputs]:
        """Forward some of a pack's rows, with a graph if it is kept."""
        batch = self.policy.collate(pack.rows_of(members))
        self.policy.module.train(keep)
        with torch.set_grad_enabled(keep):
            outputs = self.backend.forward(batch)
        if keep:
            self._kept[pack] = Kept(tuple(members), outputs.logprobs, outputs.entropy)
            self._num_kept_tokens += pack.num_tokens
        return batch, outputs

    def _logprobs_of(self, pack: Pack, members: Sequence[Member]) -> dict[Member, list[float]]:
        """[T] of some of a pack's rows, without a graph, the module in evaluation mode."""
        _, outputs = self._run(pack, members, keep=False)
        return _by_member(pack, members, outputs)

    def _find_old(self, wanted: Sequence[tuple[Pack, Sequence[Member]]]) -> None:
        """Log-probs under the weights of now. Which are missing is settled first: a filler's are
        known after its first forward, and ranks would fall out of step."""
        missing = [
            (pack, members)
            for pack, members in wanted
            if not all(member in self._old for member in members)
        ]
        for pack, members in missing:
            self._old.update(self._logprobs_of(pack, members))

    def _find_reference(
        self,
        wanted: Sequence[tuple[Pack, Sequence[Member]]],
        still_waiting: Callable[[], bool] = lambda: True,
    ) -> None:
        """Under one `reference()`: with full fine-tuning it moves a whole model's weights."""
        if not self.config.algorithm.kl_coeff:
            return
        missing = [
            (pack, members)
            for pack, members in wanted
            if self.collective or not self._reference_known(members)
        ]
        if not missing:
            return
        with self._tally.clock("learn_reference"), self.policy.reference():
            for pack, members in missing:
                if not still_waiting():
                    return
                self._reference.update(self._logprobs_of(pack, members))

    def _reference_known(self, members: Sequence[Member]) -> bool:
        return not self.config.algorithm.kl_coeff or all(m in self._reference for m in members)

    # --- backwards and steps ------------------------------------------------------------------

    def _backward(self, part: Part, pack: Pack) -> None:
        """Forward unless one was kept, loss, backward."""
        kept = self._kept.pop(pack, None)
        if kept is None:
            members = self._rows_to_train(pack)
            self.policy.module.train()
            with self._tally.clock("learn_forward"):
                outputs = self.backend.forward(self.policy.collate(pack.rows_of(members)))
            kept = Kept(members, outputs.logprobs, outputs.entropy)
        rows = pack.rows_of(kept.members)
        inputs = loss_inputs(
            rows, [self._sequences.get(member) for member in kept.members], self.dist.device
        )

        def padded(values: Mapping[Member, list[float]]) -> torch.Tensor:
            found_B = [
                values.get(member, [0.0] * len(ids))
                for member, (_, ids) in zip(kept.members, rows, strict=True)
            ]
            return pad(found_B, torch.float32, self.dist.device).masked_fill(~inputs.mask, 0.0)

        algorithm = self.config.algorithm
        logprobs = kept.logprobs.masked_fill(~inputs.mask, 0.0)
        old = padded(self._old) if self._is_stale(part) else logprobs.detach()
        reference = padded(self._reference) if algorithm.kl_coeff else None
        loss = objective(
            algorithm,
            logprobs,
            old,
            inputs.sampler_logprobs,
            reference,
            inputs.advantages,
            inputs.mask,
            part.planned,
        )
        with self._tally.clock("learn_backward"):
            self.backend.backward(loss.total)
        self._tally.measure(
            inputs, loss, logprobs.detach(), old, reference, kept.entropy, algorithm.importance_cap
        )

    def _step(self, gradient_scale: float) -> None:
        with self._tally.clock("learn_step"):
            outcome = self.backend.step(self.learning_rate, gradient_scale)
        self._tally.close_step(gradient_scale, len(self.parts))
        if outcome.applied:
            self.on_step()
            self._tally.num_applied += 1
            self._tally.metrics.add("optimizer/grad_norm", outcome.grad_norm)
            return
        self._tally.num_skipped += 1
        if self.dist.rank == 0:
            log.warning(
                "the gradient's norm is %s: optimiser step skipped, weights and moments untouched",
                outcome.grad_norm,
            )


def _by_member(
    pack: Pack, members: Sequence[Member], outputs: TokenOutputs
) -> dict[Member, list[float]]:
    """Each row's own [T] log-probs."""
    values_BC = outputs.logprobs.detach().tolist()
    rows = pack.rows_of(members)
    return {
        member: values_C[: len(ids)]
        for member, values_C, (_, ids) in zip(members, values_BC, rows, strict=True)
    }
