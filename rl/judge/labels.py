"""Scores from the probabilities of one-token labels (Edit-R1, 2510.16888; Z-Reward, 2606.09076)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from rl.judge.reply import LOGPROB_ROUNDING, UnreadableReplyError, json_object, logprob_in

DIGITS = tuple("0123456789")
"""Labels of the scores 0 to 9."""


@dataclass(frozen=True)
class Distribution:
    """The judge's distribution over the labels."""

    probs: tuple[float, ...]
    """Of the scores 0, 1, ..., renormalised to sum to 1."""
    legal_mass: float
    """Sum of the labels' probabilities before that, 0..1."""

    @property
    def entropy(self) -> float:
        """-sum p ln p, nats, 0 to ln len(probs)."""
        return -math.fsum(prob * math.log(prob) for prob in self.probs if prob > 0)


def expected_minimum(*distributions: Distribution) -> float:
    """E[min(a, b, ...)] = sum over t >= 1 of P(a >= t) P(b >= t) ..., for independent scores with
    these distributions; of one score, its mean. (min(E[a], E[b]) would be larger.)"""
    at_least = [tuple(accumulate(reversed(d.probs)))[::-1] for d in distributions]
    return math.fsum(math.prod(tails) for tails in list(zip(*at_least, strict=True))[1:])


def read_distribution(reply: str, labels: Sequence[str], min_legal_mass: float) -> Distribution:
    """The distribution in a reply to a question with labels. A label without a log-prob counts as
    0: it is less likely than all tokens that were returned.

    Raises `UnreadableReplyError`, also if less than `min_legal_mass` is on the labels: the judge
    then wanted to write something else, such as a sentence.
    """
    logprobs = json_object(reply).get("logprobs")
    if not isinstance(logprobs, dict) or not logprobs.keys() <= set(labels):
        raise UnreadableReplyError('no log-probs of the labels under "logprobs"')
    found = {label: math.exp(logprob_in(value)) for label, value in logprobs.items()}
    mass = math.fsum(found.values())
    if mass > 1 + LOGPROB_ROUNDING * len(labels):
        raise UnreadableReplyError("log-probs whose probabilities sum to more than 1")
    if mass < min_legal_mass:
        share = f"{mass:.3g} of the first token's probability is on the labels"
        raise UnreadableReplyError(f"{share}, less than min_legal_mass={min_legal_mass:g}")
    return Distribution(tuple(found.get(label, 0.0) / mass for label in labels), min(1.0, mass))
