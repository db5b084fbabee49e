"""Loads the learner's weights into the inference engine and verifies that they arrived."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from rl.api.engine import Engine
from rl.api.types import Completion, Prompt, SamplingParams
from rl.learner.learner import Learner

PROBE_COMPLETIONS = 8
PROBE_TOKENS = 8
"""Number and length of the probe's completions, which the engine decodes in one batch."""
NUM_COMPARED = 16
"""Only the least certain tokens are compared: a trained policy is nearly certain of most tokens,
whatever the weights; the first 16 differed by 0.012 nats where an iteration's k3 was 0.79."""
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
    # What an engine reads back may be what it was sent, not what it computes with. In bfloat16 a
    # small step moves few log-probs, the trainer's as well.
    if previous is not None and completions_G == previous.answers:
        pairs = list(_pairs(previous.trainer_logprobs, trainer_GT))
        num_moved = sum(before != after for before, after in pairs)
        if num_moved > (0 if reported is None else len(pairs) / 2):
            moved = _mean_difference(previous.trainer_logprobs, trainer_GT)
            raise SyncError(
                "the weight sync changed nothing: the inference engine answers the probe as before "
                f"it, bit for bit, while the trainer's log-probs moved by {moved:.3g} nats on "
                "average. Its load_weights drops the weights"
            )
    mean = _mean_difference([c.logprobs for c in completions_G], trainer_GT, NUM_COMPARED)
    if not mean <= MAX_MEAN_DLOGP_NATS[dtype]:
        raise SyncError(
            "after the weight sync the inference engine's log-probs differ from the trainer's by "
            f"{mean:.3g} nats on average over the least certain tokens of the probe (allowed for "
            f"{dtype}: {MAX_MEAN_DLOGP_NATS[dtype]}). The engine does not hold the policy: check "
            "that both sides load the same base model, adapter shape and scale, and sample at the "
            "same temperature."
        )
    return SyncReport(weights.fingerprint, mean, reported is not None, completions_G, trainer_GT)


def _mean_difference(
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
