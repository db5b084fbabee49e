"""One optimizer step: forward with kept graphs, losses, backward in a fixed order, metrics."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain, islice, pairwise
from typing import Protocol

import torch

from rl.algorithm.grpo import (
    Mismatch,
    Objective,
    effective_sample_share,
    kl_per_token,
    loss_named,
    mismatch,
    objective,
)
from rl.algorithm.metrics import SPREAD_TOLERANCE, Metrics
from rl.api.loss import Denominators, LossInputs, divisor
from rl.api.policy import Policy
from rl.api.types import Prompt, Row, TokenBatch, TokenOutputs, TrainSequence
from rl.config.schema import AlgorithmConfig, RunConfig
from rl.learner.backends import Backend, StepOutcome
from rl.model_files import evaluating
from rl.ranks.dist import Dist, is_sharded

# ---- micro batches -------------------------------------------------------------------------------
# Packs a rank's groups into micro-batches, keeps ranks in step, and runs forwards without graphs.
#
# Axes: `_P` prompts on this rank, `_G` completions of a prompt, `_B` rows of a micro-batch, `_C`
# completion tokens, right-padded.

Member = tuple[int, int]
"""(p, g): completion g of this rank's prompt p."""
FILLER: Member = (-1, 0)
"""A row without loss that keeps this rank in step with the others."""
Members = tuple[Member, ...]
Logprobs = dict[Member, list[float]]
"""Completion -> the log-probs of its own tokens, nats."""


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Rows of one packed forward: whole groups where they fit in the token budget."""

    rows: tuple[Row, ...]
    members: Members
    """The completion that each row belongs to."""
    trainable: Members = ()
    """All members but fillers and those of the bare variant."""

    @property
    def to_read(self) -> Members:
        """Members whose reference and old log-probs are computed: the trainable ones or, without
        any, one other, because ranks may have to forward together."""
        return self.trainable or self.members[:1]

    @property
    def num_tokens(self) -> int:
        """Tokens of the packed row, which holds each group's prompt once."""
        prompts = {id(prompt): len(prompt.token_ids) for prompt, _ in self.rows}
        return sum(prompts.values()) + sum(len(ids) for _, ids in self.rows)

    def rows_of(self, members: Sequence[Member]) -> list[Row]:
        row_of = dict(zip(self.members, self.rows, strict=True))
        return [row_of[member] for member in members]


def pack_groups(
    prompts_P: Sequence[Prompt],
    ids_PG: Sequence[Sequence[Sequence[int]]],
    max_tokens: int,
    groups: range | None = None,
    num_sampled_P: Sequence[int] | None = None,
) -> list[MicroBatch]:
    """Pack `groups` (None: all), in order, into micro-batches of at most `max_tokens`.

    A longer group is split between completions; a longer completion gets a micro-batch of its own.
    `num_sampled_P`: how many completions of each group the policy sampled (None: all); the others
    are paired with the prompt's `plain`.
    """
    nums_P = num_sampled_P or [len(ids_G) for ids_G in ids_PG]
    packs: list[list[Member]] = [[]]

    def row_of(p: int, g: int) -> Row:
        return prompts_P[p] if g < nums_P[p] else prompts_P[p].plain, ids_PG[p][g]

    def packed(members: Sequence[Member]) -> MicroBatch:
        trainable = tuple((p, g) for p, g in members if g < nums_P[p])
        return MicroBatch(tuple(row_of(p, g) for p, g in members), tuple(members), trainable)

    def is_full(*more: Member) -> bool:
        return bool(packs[-1]) and packed([*packs[-1], *more]).num_tokens > max_tokens

    for p in range(len(prompts_P)) if groups is None else groups:
        group = [(p, g) for g in range(len(ids_PG[p]))]
        if is_full(*group):
            packs.append([])
        for member in group:
            if is_full(member):
                packs.append([])
            packs[-1].append(member)
    return [packed(members) for members in packs if members]


def split_evenly(num_groups: int, num_minibatches: int) -> list[range]:
    """Ranges of group numbers, in order, as even as possible; some may be empty."""
    bounds = [num_groups * i // num_minibatches for i in range(num_minibatches + 1)]
    return [range(start, end) for start, end in pairwise(bounds)]


def in_lockstep(
    micro_batches: Sequence[MicroBatch], filler: Row | None, dist: Dist
) -> list[MicroBatch]:
    """The micro-batches, padded with fillers to the largest number on any rank. Collective."""
    missing = dist.max_int(len(micro_batches)) - len(micro_batches)
    if not missing:
        return list(micro_batches)
    assert filler is not None, "some rank has a row"
    return [*micro_batches, *(MicroBatch((filler,), (FILLER,)) for _ in range(missing))]


def shared_filler(rows: Sequence[Row], dist: Dist) -> Row | None:
    """The row to use in fillers: this rank's first row or, if this rank has none, another rank's;
    None if no rank has a row. Collective."""
    first_row = rows[0] if rows else None
    if not dist.any(first_row is None):
        return first_row
    portable = None
    if first_row is not None:
        prompt = first_row[0]
        # Keeps the forward's picture inputs, because every rank must run the vision tower.
        sample = replace(prompt.sample, sources=(), target=None)
        plain = prompt.without_thought and replace(prompt.without_thought, sample=sample)
        portable = (replace(prompt, sample=sample, without_thought=plain), first_row[1])
    gathered = [row for row in dist.gather(portable) if row is not None]
    return first_row or (gathered[0] if gathered else None)


def by_member(
    micro_batch: MicroBatch, members: Sequence[Member], outputs: TokenOutputs
) -> Logprobs:
    """Completion -> the log-probs of its own tokens, without padding, nats."""
    values_BC = outputs.logprobs.detach().tolist()
    rows = micro_batch.rows_of(members)
    return {
        member: values_C[: len(ids)]
        for member, values_C, (_, ids) in zip(members, values_BC, rows, strict=True)
    }


class Forwards(Protocol):
    """A batch's micro-batches, and the forward over each."""

    collective: bool
    """Whether every rank must take part in each forward (ZeRO-3 gathers weights). If so, all
    forwards run before any work that ranks do at their own pace."""

    @property
    def micro_batches(self) -> Sequence[MicroBatch]: ...

    def states(self, micro_batch: MicroBatch) -> tuple[TokenBatch, TokenOutputs]:
        """The forward whose hidden states `decode_actions` reads, if the policy `reads_states`."""
        ...


class NoGradForwards:
    """Runs forwards without a graph, with the module in evaluation mode."""

    def __init__(
        self,
        policy: Policy,
        prompts_P: Sequence[Prompt],
        ids_PG: Sequence[Sequence[Sequence[int]]],
        max_tokens: int,
        dist: Dist,
        weights: Callable[[], AbstractContextManager[None]] = nullcontext,
        num_sampled_P: Sequence[int] | None = None,
    ) -> None:
        """`weights`: context manager around each forward, such as the policy's `reference`.
        `num_sampled_P`: as in `pack_groups`. Collective if `self.collective`."""
        self._policy = policy
        self._weights = weights
        self.collective = is_sharded(policy.module)
        micro_batches = pack_groups(prompts_P, ids_PG, max_tokens, num_sampled_P=num_sampled_P)
        if self.collective:
            rows = [row for micro_batch in micro_batches for row in micro_batch.rows]
            micro_batches = in_lockstep(micro_batches, shared_filler(rows, dist), dist)
        self.micro_batches: Sequence[MicroBatch] = micro_batches

    def forward(self, micro_batch: MicroBatch) -> tuple[TokenBatch, TokenOutputs]:
        return self._run(self._policy.collate(micro_batch.rows))

    def states(self, micro_batch: MicroBatch) -> tuple[TokenBatch, TokenOutputs]:
        rows = micro_batch.rows
        return self._run(self._policy.collate_states(rows) or self._policy.collate(rows))

    def _run(self, batch: TokenBatch) -> tuple[TokenBatch, TokenOutputs]:
        module = self._policy.module
        with evaluating(module), torch.no_grad(), self._weights():
            return batch, module(batch)


# ---- step metrics --------------------------------------------------------------------------------
# Collects the metrics of one iteration's updates over their micro-batches.


def on_device(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Copy a CPU tensor to the device of `like` without waiting for the GPU's earlier work."""
    return tensor.to(like.device, non_blocking=True)


LOSSES = ("loss/total", "loss/policy", "loss/kl")
WEIGHTS = ("mismatch/weight", "mismatch/weight_squared")
SUMS = (*LOSSES, *WEIGHTS)
MAXIMA = ("policy/ratio_max", "mismatch/max_abs_dlogp")


@dataclass
class LearnerMetrics:
    """The metrics of one `TrainStep`, collected without waiting for the GPU."""

    metrics: Metrics = field(default_factory=Metrics)
    num_applied: int = 0
    num_skipped: int = 0
    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Sums over tokens, and the current step's losses, still divided by planned denominators."""
    _measured: list[tuple[int, list[str], torch.Tensor]] = field(default_factory=list)
    """Per micro-batch: number of tokens, names, values (float64, on the device)."""

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
        values = dict(zip(LOSSES, (loss.total, loss.policy_loss, loss.kl_loss), strict=True))
        tokens_N2 = [
            (b, c) for b, mask in enumerate(masks_B) for c, is_in in enumerate(mask) if is_in
        ]
        if tokens_N2:
            rows, columns = on_device(torch.tensor(tokens_N2).T.contiguous(), entropy)

            def of_tokens(values_BC: torch.Tensor) -> torch.Tensor:
                """[N], of the tokens that carry loss."""
                return values_BC.detach()[rows, columns]

            ratio, importance = of_tokens(loss.policy.ratio), of_tokens(loss.importance)
            differences = mismatch(
                of_tokens(inputs.old_logprobs), of_tokens(inputs.sampler_logprobs)
            )
            values |= {
                "policy/entropy": of_tokens(entropy).mean(),
                "policy/clip_fraction": of_tokens(loss.policy.clipped).float().mean(),
                "policy/ratio_mean": ratio.mean(),
                "policy/ratio_max": ratio.max(),
                **{f"mismatch/{n}": d for n, d in zip(Mismatch._fields, differences, strict=True)},
                "mismatch/weight_mean": importance.mean(),
                "mismatch/weight_capped": (importance >= importance_cap).float().mean(),
            }
            for name in ("mismatch/k1", "mismatch/k3"):  # `mismatch` sums; these are means
                values[name] /= len(tokens_N2)
            if reference is not None:
                for estimator in ("k1", "k3"):
                    kl = kl_per_token(inputs.logprobs.detach(), reference, estimator)
                    values[f"kl/reference_{estimator}"] = of_tokens(kl).mean()
        vector = torch.stack([value.detach().double() for value in values.values()])
        self._measured.append((len(tokens_N2), list(values), vector))

    def close_step(self, gradient_scale: float, num_steps: int) -> None:
        """Add what was measured in a step, fetched in one copy, and the step's losses, rescaled to
        true denominators and divided by `num_steps`."""
        vectors = [vector for *_, vector in self._measured]
        fetched = iter(torch.cat(vectors).tolist() if vectors else ())
        for num_tokens, names, _ in self._measured:
            self.sums["tokens"] += num_tokens
            if num_tokens:
                self.metrics.total("tokens/trained", num_tokens)
            for name, value in zip(names, islice(fetched, len(names)), strict=True):
                if name in SUMS:
                    self.sums[name] += value
                elif name in MAXIMA:
                    self.metrics.maximum(name, value)
                else:
                    self.metrics.add(name, value, num_tokens)
        self._measured.clear()
        for name in LOSSES:
            self.metrics.total(name, self.sums.pop(name, 0.0) * gradient_scale / num_steps)

    def report(self, learning_rate: float, dist: Dist) -> Metrics:
        """All metrics, including those computed from sums over all ranks. Collective."""
        metrics = self.metrics
        metrics.add("optimizer/learning_rate", learning_rate)
        num_tokens, weight, squared = dist.sum_floats(
            [self.sums[name] for name in ("tokens", *WEIGHTS)]
        )
        if num_tokens:
            metrics.add("mismatch/ess", effective_sample_share(num_tokens, weight, squared))
        metrics.maximum("optimizer/steps", self.num_applied)
        metrics.maximum("optimizer/skipped_steps", self.num_skipped)
        return metrics


# ---- train step ----------------------------------------------------------------------------------
# Runs an iteration's forwards, backwards and optimizer steps, each as early as possible.
#
# Axes: as for micro-batches, above.

log = logging.getLogger(__name__)

MembersOf = Mapping[MicroBatch, Members]
"""Micro-batches, in order -> those of their rows that are computed."""


@dataclass(eq=False)
class Minibatch:
    """The micro-batches of one optimizer step."""

    micro_batches: list[MicroBatch]
    planned: Denominators
    """Counts over all ranks, as if every completion were graded."""
    num_done: int = 0
    """Micro-batches whose backward has run."""


@dataclass(frozen=True, eq=False)
class KeptForward:
    """A forward with its graph."""

    members: Members
    logprobs: torch.Tensor
    """[B, C] float32, nats, with gradient."""
    entropy: torch.Tensor
    """[B, C] float32, nats."""


@dataclass(eq=False)
class TrainStep:
    """An iteration between its rollout and its last optimizer step; also the rollout's `Forwards`.

    The gradient does not depend on how the batch is split: a loss is divided by counts over all
    ranks that were planned before the judge replied, and the step multiplies by one factor that
    corrects for what was graded. Backwards run in the order of the micro-batches and over the same
    rows whenever grades arrive, because float sums depend on the order. If `backend.lockstep`, all
    ranks run equally many forwards and backwards, over one row if a rank has none to train.
    """

    policy: Policy
    backend: Backend
    config: RunConfig
    dist: Dist
    learning_rate: float
    minibatches: list[Minibatch]
    """In the order of the steps; the first is computed with the weights of the rollout."""
    keeps_graphs: bool
    """Whether a backward through the rollout's forward is exact here."""
    optimizer_step: Callable[[float, float], StepOutcome]
    """The learner's step, which also counts its version; takes (learning rate, gradient scale)."""
    measures_rise: bool = False
    """Whether to measure, by one more forward, if the first step makes completions with higher
    rewards likelier."""
    _kept: dict[MicroBatch, KeptForward] = field(default_factory=dict)
    _num_tokens_kept_so_far: int = 0  # graphs that are freed again included
    _old: Logprobs = field(default_factory=dict)
    """Log-probs under the rollout's weights, nats."""
    _reference: Logprobs = field(default_factory=dict)
    _sequences: dict[Member, TrainSequence] = field(default_factory=dict)
    _accumulated: set[int] = field(default_factory=set)
    _trained: list[tuple[MicroBatch, Members, torch.Tensor, torch.Tensor]] = field(
        default_factory=list
    )
    """The backwards of the first step, if it `measures_rise`: rows, log-probs and loss mask."""

    def __post_init__(self) -> None:
        self.collective = is_sharded(self.policy.module)
        self._learner_metrics = LearnerMetrics()
        limit = self.config.optimizer.max_kept_tokens
        self._max_kept_tokens = math.inf if limit is None else limit
        self.micro_batches = list(chain.from_iterable(m.micro_batches for m in self.minibatches))
        """All of them, in order, fillers included."""
        stale = self.minibatches[0 if self.config.max_staleness > 0 else 1 :]
        self._stale = set(chain.from_iterable(minibatch.micro_batches for minibatch in stale))
        """Micro-batches whose weights change between rollout and backward."""

    def states(self, micro_batch: MicroBatch) -> tuple[TokenBatch, TokenOutputs]:
        """The forward that conditions the renderer. If the renderer reads other rows than those
        trained, `work_ahead` runs the trained rows' forward later: no picture waits for it."""
        batch = self.policy.collate_states(micro_batch.rows)
        if batch is None:
            return self.forward(micro_batch)
        self.policy.module.eval()
        with torch.no_grad():
            return batch, self.backend.forward(batch)

    def forward(self, micro_batch: MicroBatch) -> tuple[TokenBatch, TokenOutputs]:
        """The rollout's forward of all rows; its graph is kept where the backward can use it."""
        keep = self._has_room(micro_batch)
        batch, outputs = self._run(micro_batch, micro_batch.members, keep)
        if micro_batch in self._stale:
            self._old.update(by_member(micro_batch, micro_batch.members, outputs))
        return batch, outputs

    def work_ahead(self, still_waiting: Callable[[], bool]) -> None:
        """Work that needs no reward: reference log-probs, and forwards that the rollout skipped.

        Stops between two micro-batches when `still_waiting()` is False: then the grades are known,
        and groups without loss need neither.
        """
        if self.collective:
            return
        for micro_batch in self.minibatches[0].micro_batches:
            if not still_waiting():
                return
            members = micro_batch.trainable
            if micro_batch not in self._kept and members and self._has_room(micro_batch):
                self._run(micro_batch, members, keep=True)
        self._compute_reference({m: m.trainable for m in self.micro_batches}, still_waiting)

    def compute_old_logprobs(self) -> None:
        """Compute missing old log-probs before the weights change. Collective if forwards are."""
        self._compute_old({m: m.to_read for m in self.micro_batches})

    def accumulate(self, p: int, sequences_G: Sequence[TrainSequence | None]) -> None:
        """Add prompt p's graded completions, None for those without loss, and run the backward of
        every micro-batch that is now complete, unless ranks have to run backwards together."""
        for g, sequence in enumerate(sequences_G):
            if sequence is not None and any(sequence.loss_mask):
                self._sequences[p, g] = sequence
        self._accumulated.add(p)
        if self.backend.lockstep:
            return
        minibatch = self.minibatches[0]
        for micro_batch in minibatch.micro_batches[minibatch.num_done :]:
            if not all(p in self._accumulated for p, _ in micro_batch.members):
                return
            members = self._to_train(micro_batch)
            if not self._reference_known(members):
                return
            if members:
                self._backward(minibatch, micro_batch, members)
            self._kept.pop(micro_batch, None)
            minibatch.num_done += 1

    def step(self) -> Metrics:
        """Run the remaining backwards and the optimizer steps, after every group was added. Returns
        this rank's metrics. Collective."""
        plan = self._plan()
        for micro_batch in self._kept.keys() - plan.keys():
            del self._kept[micro_batch]
        self._compute_old({m: members for m, members in plan.items() if m in self._stale})
        for minibatch in self.minibatches:
            actual = self._count(minibatch)
            if actual.num_tokens == 0:
                continue
            remaining = [m for m in minibatch.micro_batches[minibatch.num_done :] if m in plan]
            self._compute_reference({m: m.to_read for m in remaining})
            for micro_batch in remaining:
                self._backward(minibatch, micro_batch, plan[micro_batch])
            loss = loss_named(self.config.algorithm.loss)
            self._optimizer_step(divisor(loss, minibatch.planned) / divisor(loss, actual))
            self._measure_rise()
        return self._learner_metrics.report(self.learning_rate, self.dist)

    def _to_train(self, micro_batch: MicroBatch) -> Members:
        """The rows of its backward, once all are graded. Where the graph may be kept, all trainable
        rows if any has loss: which forwards were kept must not change a sum. Elsewhere only the
        rows with loss."""
        live = tuple(member for member in micro_batch.members if member in self._sequences)
        return micro_batch.trainable if live and self._may_keep(micro_batch) else live

    def _plan(self) -> MembersOf:
        """The rows of the remaining backwards; one row where only other ranks have rows to run."""
        remaining = chain.from_iterable(m.micro_batches[m.num_done :] for m in self.minibatches)
        plan = {micro_batch: self._to_train(micro_batch) for micro_batch in remaining}
        if self.backend.lockstep:
            ranks_with_rows = self.dist.sum_floats([float(bool(rows)) for rows in plan.values()])
            for micro_batch, num_ranks in zip(list(plan), ranks_with_rows, strict=True):
                if num_ranks and not plan[micro_batch]:
                    plan[micro_batch] = micro_batch.to_read[:1]
        return {micro_batch: members for micro_batch, members in plan.items() if members}

    def _count(self, minibatch: Minibatch) -> Denominators:
        """The step's real denominators over all ranks: of the `counted` sequences or, if there are
        none, of all sequences with loss."""
        members = chain.from_iterable(m.members for m in minibatch.micro_batches)
        live = [self._sequences[member] for member in members if member in self._sequences]
        counted = [sequence for sequence in live if sequence.counted]

        def sums(sequences: Sequence[TrainSequence]) -> tuple[float, float]:
            return sum(sum(s.loss_mask) for s in sequences), len(sequences)

        totals = self.dist.sum_floats([*sums(counted), *sums(live)])
        num_tokens, num_sequences = totals[:2] if totals[0] else totals[2:]
        return replace(minibatch.planned, num_tokens=num_tokens, num_sequences=num_sequences)

    def _may_keep(self, micro_batch: MicroBatch) -> bool:
        """Whether the graph of its forward may be kept until the rewards are known."""
        is_exact = self.keeps_graphs and micro_batch not in self._stale
        fits = FILLER not in micro_batch.members and micro_batch.num_tokens <= self._max_kept_tokens
        return is_exact and fits

    def _has_room(self, micro_batch: MicroBatch) -> bool:
        num_tokens = self._num_tokens_kept_so_far + micro_batch.num_tokens
        return self._may_keep(micro_batch) and num_tokens <= self._max_kept_tokens

    def _run(
        self, micro_batch: MicroBatch, members: Sequence[Member], keep: bool
    ) -> tuple[TokenBatch, TokenOutputs]:
        """Forward some of a micro-batch's rows; with `keep`, with a graph, which is kept."""
        batch = self.policy.collate(micro_batch.rows_of(members))
        self.policy.module.train(keep)
        with torch.set_grad_enabled(keep):
            outputs = self.backend.forward(batch)
        if keep:
            self._kept[micro_batch] = KeptForward(tuple(members), outputs.logprobs, outputs.entropy)
            self._num_tokens_kept_so_far += micro_batch.num_tokens
        return batch, outputs

    def _logprobs_of(self, micro_batch: MicroBatch, members: Sequence[Member]) -> Logprobs:
        """`by_member` of some of a micro-batch's rows, without a graph, in evaluation mode."""
        _, outputs = self._run(micro_batch, members, keep=False)
        return by_member(micro_batch, members, outputs)

    def _compute_old(self, members_of: MembersOf) -> None:
        """Compute missing log-probs under the current weights. They are listed first, because all
        fillers share one entry and ranks must run equally many forwards."""
        missing = {
            micro_batch: members
            for micro_batch, members in members_of.items()
            if not all(member in self._old for member in members)
        }
        for micro_batch, members in missing.items():
            self._old.update(self._logprobs_of(micro_batch, members))

    def _compute_reference(
        self, members_of: MembersOf, still_waiting: Callable[[], bool] = lambda: True
    ) -> None:
        """Compute missing reference log-probs, all in one `reference()` context, which in full
        fine-tuning moves a whole model's weights."""
        if not self.config.algorithm.kl_coeff:
            return
        missing = {
            micro_batch: members
            for micro_batch, members in members_of.items()
            # All, so that ranks run equally many forwards.
            if self.collective or not self._reference_known(members)
        }
        if not missing:
            return
        is_base = self.config.algorithm.kl_reference == "base"
        reference = self.policy.base_model if is_base else self.policy.reference
        with reference():
            for micro_batch, members in missing.items():
                if not still_waiting():
                    return
                self._reference.update(self._logprobs_of(micro_batch, members))

    def _reference_known(self, members: Sequence[Member]) -> bool:
        return not self.config.algorithm.kl_coeff or self._reference.keys() >= {*members}

    def _backward(self, minibatch: Minibatch, micro_batch: MicroBatch, members: Members) -> None:
        """Run the loss and the backward, after a forward unless one was kept."""
        kept = self._kept.pop(micro_batch, None)
        if kept is None:
            self.policy.module.train()
            outputs = self.backend.forward(self.policy.collate(micro_batch.rows_of(members)))
            kept = KeptForward(members, outputs.logprobs, outputs.entropy)
        algorithm = self.config.algorithm

        def in_order(logprobs: Mapping[Member, list[float]]) -> torch.Tensor:
            # A row without a sequence carries no loss, and its log-probs may be missing.
            rows = [logprobs[m] if m in self._sequences else [] for m in kept.members]
            return pad(rows, torch.float32, kept.logprobs)

        sequences_B = [self._sequences.get(member) for member in kept.members]
        inputs = loss_inputs(
            algorithm,
            sequences_B,
            kept.logprobs,
            in_order(self._old) if micro_batch in self._stale else None,
            minibatch.planned,
        )
        reference = None
        if algorithm.kl_coeff:
            reference = in_order(self._reference).masked_fill(~inputs.mask, 0.0)
        if self.measures_rise:
            before = inputs.logprobs.detach()
            self._trained.append((micro_batch, kept.members, before, inputs.mask))
        loss = objective(algorithm, inputs, reference)
        self.backend.backward(loss.total)
        self._learner_metrics.measure(
            inputs,
            loss,
            reference,
            kept.entropy,
            algorithm.importance_cap,
            [s.loss_mask if s else () for s in sequences_B],
        )

    def _optimizer_step(self, gradient_scale: float) -> None:
        outcome = self.optimizer_step(self.learning_rate, gradient_scale)
        self._learner_metrics.close_step(gradient_scale, len(self.minibatches))
        if outcome.applied:
            self._learner_metrics.num_applied += 1
            self._learner_metrics.metrics.add("optimizer/grad_norm", outcome.grad_norm)
            return
        self._learner_metrics.num_skipped += 1
        if self.dist.rank == 0:
            log.warning(
                "the gradient's norm is %s: optimizer step skipped, weights and moments untouched",
                outcome.grad_norm,
            )

    def _measure_rise(self) -> None:
        """Measure (reward - its group's mean) x (log-prob after the step - before it) of the rows.
        Its mean is positive for a small step along the policy gradient. With rewards, not
        advantages, so that a wrong sign of the latter shows. Collective."""
        if not self.measures_rise:
            return
        self.measures_rise = False
        products: list[float] = []  # nats, one per completion
        for micro_batch, members, before, mask in self._trained:
            _, outputs = self._run(micro_batch, members, keep=False)
            moved_B = (outputs.logprobs - before).mul(mask).sum(1).tolist()
            sequences_B = [self._sequences.get(member) for member in members]
            for sequence, moved in zip(sequences_B, moved_B, strict=True):
                if sequence is not None and abs(sequence.excess) > SPREAD_TOLERANCE:
                    products.append(sequence.excess * moved)
        self._trained.clear()
        total, squares, num = self.dist.sum_floats(
            [sum(products), sum(x * x for x in products), len(products)]
        )
        if num > 1:
            mean = total / num
            error = (max(0.0, squares / num - mean**2) / (num - 1)) ** 0.5
            self._learner_metrics.metrics.maximum("policy/rise", mean)
            self._learner_metrics.metrics.maximum("policy/rise_error", error)


def loss_inputs(
    config: AlgorithmConfig,
    sequences_B: Sequence[TrainSequence | None],
    logprobs: torch.Tensor,
    old: torch.Tensor | None,
    planned: Denominators,
) -> LossInputs:
    """A micro-batch as padded tensors; a row without a sequence carries no loss.

    `logprobs` [B, C] float32, nats, with gradient; `old`: those under the rollout's weights;
    None: `logprobs` are these.
    """
    mask = pad([s.loss_mask if s else () for s in sequences_B], torch.bool, logprobs)
    sampler_B = [s.sampler_logprobs if s else () for s in sequences_B]
    sampler_logprobs = pad(sampler_B, torch.float32, logprobs)
    advantages = [[s.advantage if s else 0.0] for s in sequences_B]
    logprobs = logprobs.masked_fill(~mask, 0.0)
    return LossInputs(
        logprobs=logprobs,
        old_logprobs=logprobs.detach() if old is None else old.masked_fill(~mask, 0.0),
        sampler_logprobs=sampler_logprobs,
        advantages=on_device(torch.tensor(advantages, dtype=torch.float32), logprobs),
        mask=mask,
        denominators=planned,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
    )


def pad(rows_B: Sequence[Sequence[float]], dtype: torch.dtype, like: torch.Tensor) -> torch.Tensor:
    """[B, C] on the device of `like` [B, C], zeros after each row's end."""
    padded = [[*row, *[0] * (like.shape[1] - len(row))] for row in rows_B]
    return on_device(torch.tensor(padded, dtype=dtype).reshape(like.shape), like)
