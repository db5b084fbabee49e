"""Scores from the probabilities of one-token labels instead of a written number.

The judge's first token is one of the labels, the k-th of which means the score k. Its distribution
gives the expected score (Edit-R1, arXiv 2510.16888; Z-Reward, arXiv 2606.09076).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from rl.judge.reply import UnreadableReplyError, json_object, parsed, read_chat

LABELS = {"digits": tuple("0123456789"), "letters": tuple("ABCDEFGHIJK")}
"""Name -> labels from the lowest score to the highest."""
TOP_LOGPROBS = 20
"""The most that OpenAI, and vLLM without `--max-logprobs`, return."""
LOWEST_LOGPROB = -9999.0
"""What servers send for a probability of 0."""
ROUNDING = 1e-3
"""How far a server's rounding may lift a log-prob above 0, or the sum of probabilities above 1."""
MAX_TOKEN_CHARS = 40


class NoLogprobsError(UnreadableReplyError):
    """A chat completion without log-probs, so the endpoint does not support them."""


@dataclass(frozen=True)
class Distribution:
    """The judge's distribution over the labels."""

    probs: tuple[float, ...]
    """Of the scores 0, 1, ..., renormalised to sum to 1."""
    legal_mass: float
    """Sum of the labels' probabilities before that, 0..1."""

    @property
    def mean(self) -> float:
        """Expected score, 0 to len(probs) - 1."""
        return math.fsum(score * prob for score, prob in enumerate(self.probs))

    @property
    def entropy(self) -> float:
        """-sum p ln p, nats, 0 to ln len(probs)."""
        return -math.fsum(prob * math.log(prob) for prob in self.probs if prob > 0)


def expected_minimum(distributions: Sequence[Distribution]) -> float:
    """E[min(a, b, ...)] = sum over t >= 1 of P(a >= t) P(b >= t) ..., for independent scores with
    these distributions over the same labels. (min(E[a], E[b]) would be larger.)"""
    at_least = [tuple(accumulate(reversed(d.probs)))[::-1] for d in distributions]
    return math.fsum(math.prod(tails) for tails in list(zip(*at_least, strict=True))[1:])


def read_label_chat(body: bytes, labels: Sequence[str]) -> tuple[str, str | None]:
    """As `rl.judge.reply.read_chat`; the reply is the JSON of the first token and of the labels'
    log-probs in its place, nats: `{"token": "7", "logprobs": {"6": -1.5, "7": -0.3}}`.

    Raises `NoLogprobsError` or `UnreadableReplyError`.
    """
    _, model = read_chat(body)
    try:
        first = parsed(body)["choices"][0]["logprobs"]["content"][0]
        entries = [first, *(first["top_logprobs"] or [])]
        pairs = [(entry["token"], entry["logprob"]) for entry in entries]
    except (LookupError, TypeError):
        raise NoLogprobsError("no log-probs of the first token") from None
    logprobs: dict[str, float] = {}
    for token, logprob in pairs:
        if token in labels and logprobs.setdefault(token, logprob) != logprob:
            raise UnreadableReplyError(f'two log-probs of the label "{token}"')
    reply = {
        "token": str(first["token"])[:MAX_TOKEN_CHARS],
        "logprobs": {label: _checked(logprobs[label]) for label in labels if label in logprobs},
    }
    return json.dumps(reply), model


def _checked(logprob: Any) -> float:
    is_number = isinstance(logprob, int | float) and not isinstance(logprob, bool)
    if not is_number or not logprob <= ROUNDING:  # also NaN
        raise UnreadableReplyError("a log-prob that is no number of at most 0")
    return max(float(logprob), LOWEST_LOGPROB)


def read_distribution(reply: str, labels: Sequence[str], min_legal_mass: float) -> Distribution:
    """The distribution in a reply of `read_label_chat`. A label without a log-prob counts as 0:
    it is less likely than the `TOP_LOGPROBS` tokens that were returned.

    Raises `UnreadableReplyError`, also if less than `min_legal_mass` is on the labels: the judge
    then wanted to write something else, such as a sentence.
    """
    logprobs = json_object(reply).get("logprobs")
    if not isinstance(logprobs, dict) or not logprobs.keys() <= set(labels):
        raise UnreadableReplyError('no log-probs of the labels under "logprobs"')
    masses = [math.exp(_checked(logprobs.get(label, LOWEST_LOGPROB))) for label in labels]
    legal_mass = math.fsum(masses)
    if legal_mass > 1 + ROUNDING * len(labels):
        raise UnreadableReplyError("log-probs whose probabilities sum to more than 1")
    if legal_mass < min_legal_mass:
        share = f"{legal_mass:.3g} of the first token's probability is on the labels"
        raise UnreadableReplyError(f"{share}, less than min_legal_mass={min_legal_mass:g}")
    return Distribution(tuple(mass / legal_mass for mass in masses), min(1.0, legal_mass))


def read_token_ids(body: bytes) -> list[int] | None:
    """The ids in an answer to vLLM's `/tokenize`; None if it is not such an answer."""
    try:
        ids = parsed(body)["tokens"]
    except (UnreadableReplyError, LookupError, TypeError):
        return None
    return ids if isinstance(ids, list) and all(type(each) is int for each in ids) else None
