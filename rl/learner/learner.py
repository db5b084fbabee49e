"""The policy's optimizer, its learning rate and state, and its weights for the inference engine."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch

from rl.api.engine import Engine
from rl.api.loss import Denominators
from rl.api.policy import Policy
from rl.api.types import Completion, PolicyWeights, Prompt, Row, SamplingParams
from rl.config.schema import RunConfig
from rl.learner.backends import (
    STATE_PARTS,
    Backend,
    StepOutcome,
    TorchBackend,
    trainable_parameters,
)
from rl.learner.train_step import (
    Logprobs,
    Minibatch,
    NoGradForwards,
    TrainStep,
    by_member,
    in_lockstep,
    pack_groups,
    shared_filler,
    split_evenly,
)
from rl.model_files import require_finite
from rl.ranks.dist import Dist, is_sharded

# ---- learner -------------------------------------------------------------------------------------
# Opens an iteration's `TrainStep`; exports and restores weights and optimizer state.
#
# Axes: `_P` prompts on this rank, `_G` completions of a prompt.

NUM_MEASURED = 3
"""Number of iterations at the start of a run that measure whether their first step raises the
log-probs of completions whose reward is above their group's mean."""


class Learner:
    """Trains `policy.module`. Every method is collective over `dist`."""

    def __init__(self, policy: Policy, config: RunConfig, dist: Dist, num_iterations: int) -> None:
        """`policy`: its module is on `dist.device`.

        Raises ValueError when nothing is trainable or the backend does not support the module.
        """
        self._policy = policy
        self._config = config
        self._dist = dist
        self._num_iterations = num_iterations
        self.version = 0
        """Optimizer steps taken so far; skipped ones do not count."""
        self.state_is_consistent = True
        """False permanently once a step raises midway: weights and moments may then disagree."""
        with torch.no_grad():  # start from rank 0's weights: the ranks' random init may differ
            for parameter in trainable_parameters(policy.module).values():
                if dist.rank != 0:
                    parameter.zero_()
                dist.sum_(parameter.data)
        self._backend: Backend
        # ZeRO 0 shards nothing: plain PyTorch does the same.
        if config.optimizer.backend == "torch" or config.optimizer.zero_stage == 0:
            self._backend = TorchBackend(policy.module, config.optimizer, dist)
        else:
            from rl.learner.backends import DeepSpeedBackend

            self._backend = DeepSpeedBackend(policy.module, config.optimizer, dist)

    def begin(
        self,
        iteration: int,
        prompts_P: Sequence[Prompt],
        ids_PG: Sequence[Sequence[Sequence[int]]],
        num_completions_P: Sequence[int],
        trains: bool = True,
    ) -> TrainStep:
        """Prepare an iteration's `TrainStep`; no forward runs yet. Collective.

        Args:
            iteration: 0-based, over the whole run; sets the learning rate.
            prompts_P: this rank's prompts; may be empty, on some ranks or on all.
            ids_PG: token ids of every completion to forward; the bare variant comes last.
            num_completions_P: number of trainable completions of each group.
            trains: False: only its forward will be used, so no graph is kept.
        """
        config = self._config.optimizer
        together = is_sharded(self._policy.module) or self._backend.lockstep
        rows = [(p, ids) for p, ids_G in zip(prompts_P, ids_PG, strict=True) for ids in ids_G]
        filler = shared_filler(rows, self._dist) if together else None
        num_completions = self._config.prompts_per_iteration * self._config.generations_per_prompt
        minibatches = []
        for groups in split_evenly(len(prompts_P), config.updates_per_iteration):
            max_tokens = config.max_tokens_per_micro_batch
            micro_batches = pack_groups(prompts_P, ids_PG, max_tokens, groups, num_completions_P)
            if together:
                micro_batches = in_lockstep(micro_batches, filler, self._dist)
            lengths = [len(ids_PG[p][g]) for p in groups for g in range(num_completions_P[p])]
            num_tokens, num_sequences = self._dist.sum_floats([sum(lengths), len(lengths)])
            planned = Denominators(
                num_tokens=num_tokens,
                num_sequences=num_sequences,
                num_completions=num_completions / config.updates_per_iteration,
                max_completion_tokens=self._config.sampling.max_completion_tokens,
            )
            minibatches.append(Minibatch(micro_batches, planned))
        # With dropout the training forward differs from the forward that was sampled from.
        has_dropout = any(
            isinstance(part, torch.nn.Dropout) and part.p > 0
            for part in self._policy.module.modules()
        )
        may_keep_graphs = trains and self._config.max_staleness == 0 and not has_dropout
        return TrainStep(
            policy=self._policy,
            backend=self._backend,
            config=self._config,
            dist=self._dist,
            learning_rate=learning_rate(
                iteration,
                self._num_iterations,
                config.learning_rate,
                config.warmup_iterations,
                config.final_lr_fraction,
            ),
            minibatches=minibatches,
            keeps_graphs=may_keep_graphs and self._backend.keeps_graphs,
            optimizer_step=self._optimizer_step,
            measures_rise=trains and iteration < NUM_MEASURED,
        )

    def _optimizer_step(self, learning_rate: float, gradient_scale: float) -> StepOutcome:
        self.state_is_consistent = False
        outcome = self._backend.step(learning_rate, gradient_scale)
        self.state_is_consistent = True
        self.version += outcome.applied
        return outcome

    def logprobs(self, rows: Sequence[Row]) -> list[list[float]]:
        """The trainer's log-probs of every completion token of this rank's rows, nats.

        Ranks may pass different numbers of rows, or none.
        """
        budget = self._config.optimizer.max_tokens_per_micro_batch
        ids_P1 = [[ids] for _, ids in rows]
        forwards = NoGradForwards(self._policy, [p for p, _ in rows], ids_P1, budget, self._dist)
        logprobs_of: Logprobs = {}
        for micro_batch in forwards.micro_batches:
            _, outputs = forwards.forward(micro_batch)
            logprobs_of |= by_member(micro_batch, micro_batch.members, outputs)
        return [logprobs_of[row, 0] for row in range(len(rows))]

    def trainable_tensors(self) -> dict[str, torch.Tensor]:
        """The trained weights, unsharded, float32, keyed as `policy.module.named_parameters()`.

        Detached, but they may alias the live weights: copy them to keep them beyond the next step.
        """
        return self._backend.masters()

    def export_weights(self) -> PolicyWeights:
        """The weights that the engine must load now: those that the trainer's forward uses.

        In the trainer's dtype. Only under ZeRO-3, where no rank has all weights, the float32
        masters are gathered: they are twice the model's size while the engine is awake.
        """
        if is_sharded(self._policy.module):
            return self._policy.export_weights(self.trainable_tensors(), self.version)
        live = trainable_parameters(self._policy.module)
        tensors = {name: parameter.detach() for name, parameter in live.items()}
        return self._policy.export_weights(tensors, self.version)

    @property
    def state_bytes(self) -> int:
        """Size of the tensors that `state` copies."""
        return len(STATE_PARTS) * 4 * sum(shape.numel() for shape in self._shapes().values())

    def state(self, on_all_ranks: bool = False) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Weights and Adam moments under `<part>/<name>`, float32 on the CPU, and JSON-able meta.

        Complete on rank 0, and empty on the others unless `on_all_ranks`. Any backend, ZeRO stage
        and number of ranks can load it. The learning rate is a function of the iteration, so no
        scheduler needs saving.
        """
        return self._backend.state(self._dist.is_main or on_all_ranks), {"version": self.version}

    def load_state(self, tensors: Mapping[str, torch.Tensor], meta: Mapping[str, Any]) -> None:
        """Continue from what `state()` returned; every rank passes the complete state.

        Raises ValueError if names or shapes are not this policy's, or a number is not finite.
        """
        expected = {
            f"{part}/{name}": shape
            for part in STATE_PARTS
            for name, shape in self._shapes().items()
        }
        found = {key: tensor.shape for key, tensor in tensors.items()}
        # Missing, unknown, or with another shape.
        wrong = sorted({key for key, _ in expected.items() ^ found.items()})
        if wrong:
            raise ValueError(
                f"this checkpoint is of another policy: {len(wrong)} tensors are missing, unknown "
                f"or of another shape (first: {wrong[0]}). Use the config it was written with "
                "(same base model, LoRA rank and targets), or start under a new run_name."
            )
        require_finite(tensors.items(), "this checkpoint")
        self.version = int(meta["version"])
        self._backend.load(dict(tensors), self.version)

    def _shapes(self) -> dict[str, torch.Size]:
        return {
            name: getattr(p, "ds_shape", p.shape)
            for name, p in trainable_parameters(self._policy.module).items()
        }


def learning_rate(
    iteration: int, num_iterations: int, peak: float, warmup_iterations: int, final_fraction: float
) -> float:
    """Linear warm-up to `peak`, then linear decay to `final_fraction * peak` at the last iteration.

        i < W:  peak * (i + 1) / W              (not 0 at the first iteration)
        i >= W: peak * (1 - (1 - f) * (i - W) / (N - 1 - W))

    W = `warmup_iterations`, N = `num_iterations`, f = `final_fraction`; for N = W + 1 the last
    iteration has `peak`.
    `iteration` counts from 0 over the whole run, so a resumed run continues the same schedule.
    """
    if iteration < warmup_iterations:
        return peak * (iteration + 1) / warmup_iterations
    progress = (iteration - warmup_iterations) / max(1, num_iterations - 1 - warmup_iterations)
    return peak * (1.0 - (1.0 - final_fraction) * min(1.0, progress))


# ---- weight sync ---------------------------------------------------------------------------------
# Loads the learner's weights into the inference engine and verifies that they arrived.

PROBE_COMPLETIONS = 8
PROBE_TOKENS = 8
"""Number and length of the probe's completions, which the engine decodes in one batch."""
NUM_COMPARED = 16
"""Only the least certain tokens are compared: most are nearly certain whatever the weights. In a
run with k3 = 0.79, the first 16 tokens differed by only 0.012 nats."""
MAX_MEAN_DLOGP_NATS = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.05}
"""Mean |log-prob difference| allowed on the compared tokens, by the engine's dtype. Measured over
all tokens: 3e-5 in float32, 0.025 between two bfloat16 forwards of one model."""


@dataclass(frozen=True)
class SyncReport:
    fingerprint: str
    """Fingerprint of the weights that trainer and engine now hold."""
    mean_dlogp_nats: float | None
    """Mean |engine - trainer| over the compared tokens; None if the weights were unchanged."""
    read_back: bool
    """Whether the engine can read its weights back."""
    answers: Sequence[Completion]
    """The engine's completions of the probe at the last sync that changed weights."""
    trainer_logprobs: Sequence[Sequence[float]]
    """The trainer's log-probs of `answers`, nats."""


class SyncError(RuntimeError):
    """The inference engine does not hold the trainer's weights."""


def sync(
    engine: Engine,
    learner: Learner,
    probe: Prompt,
    dtype: str,
    temperature: float,
    previous: SyncReport | None = None,
    max_tokens: int = PROBE_TOKENS,
) -> SyncReport:
    """Load the learner's weights into the engine and verify (1) that reading them back gives what
    was sent, (2) that engine and trainer agree on the log-probs of the least certain tokens which
    the engine samples for a fixed prompt. (2) alone would detect a failure late: at EARL's learning
    rate 40 steps change the log-probs of a bfloat16 probe by less than rounding does.

    `probe`: the same prompt at every sync; `dtype`: the engine's; `temperature`: the run's.
    `previous`: report of the last sync, None at the first; weights with its fingerprint are not
    sent again, only read back. `max_tokens`: the longest completion that the engine can generate.
    Raises `SyncError`.
    """
    weights = learner.export_weights()
    unchanged = previous is not None and weights.fingerprint == previous.fingerprint
    if not unchanged:
        engine.load_weights(weights)
    reported = engine.held_fingerprint()
    if reported not in (None, weights.fingerprint):
        description = reported
        if previous is not None and reported == previous.fingerprint:
            description = "those of the previous sync: this sync changed nothing"
        raise SyncError(
            "after the weight sync the inference engine does not hold the trainer's weights; it "
            f"holds {description}. Every later completion would come from a policy other than the "
            "trained one"
        )
    if previous is not None and unchanged:
        return replace(previous, mean_dlogp_nats=None)
    params = SamplingParams(
        temperature=temperature,
        top_p=1.0,
        top_k=-1,
        max_tokens=min(PROBE_TOKENS, max_tokens),
        num_completions=PROBE_COMPLETIONS,
    )
    [completions_G] = engine.generate([probe], params, [0])
    trainer_GT = learner.logprobs([(probe, c.token_ids) for c in completions_G])
    # An engine may read back what it was sent and compute with something else. After a small
    # bfloat16 step few log-probs move, even the trainer's: with a read-back, more than half must
    # have moved.
    if previous is not None and completions_G == previous.answers:
        pairs = list(_pairs(previous.trainer_logprobs, trainer_GT))
        num_moved = sum(before != after for before, after in pairs)
        max_moved = 0 if reported is None else len(pairs) / 2
        if num_moved > max_moved:
            moved = mean_difference(previous.trainer_logprobs, trainer_GT)
            raise SyncError(
                "the weight sync changed nothing: the inference engine answers the probe as before "
                f"it, bit for bit, while the trainer's log-probs moved by {moved:.3g} nats on "
                "average. Its load_weights drops the weights"
            )
    mean = mean_difference([c.logprobs for c in completions_G], trainer_GT, NUM_COMPARED)
    if not mean <= MAX_MEAN_DLOGP_NATS[dtype]:
        raise SyncError(
            "after the weight sync the inference engine's log-probs differ from the trainer's by "
            f"{mean:.3g} nats on average over the least certain tokens of the probe (allowed for "
            f"{dtype}: {MAX_MEAN_DLOGP_NATS[dtype]}). The engine does not hold the policy: check "
            "that both sides load the same base model, adapter shape and scale, and sample at the "
            "same temperature."
        )
    return SyncReport(weights.fingerprint, mean, reported is not None, completions_G, trainer_GT)


def mean_difference(
    first_GT: Sequence[Sequence[float]],
    second_GT: Sequence[Sequence[float]],
    num_compared: int | None = None,
) -> float:
    """Mean |first - second|, nats, over the `num_compared` tokens whose log-probs have the lowest
    mean; None: over all."""
    pairs = list(_pairs(first_GT, second_GT))
    # A NaN comes first, so that it is among those compared.
    pairs.sort(key=lambda pair: (not math.isnan(sum(pair)), sum(pair)))
    return fmean(abs(first - second) for first, second in pairs[:num_compared])


def _pairs(
    first_GT: Sequence[Sequence[float]], second_GT: Sequence[Sequence[float]]
) -> Iterator[tuple[float, float]]:
    for first_T, second_T in zip(first_GT, second_GT, strict=True):
        yield from zip(first_T, second_T, strict=True)
