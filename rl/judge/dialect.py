"""Learns from error messages which optional parameters an endpoint does not accept."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

CONTENT = "<content>"
"""Placeholder for the question's parts in a request's parameters."""
RENAMED = {"max_tokens": "max_completion_tokens"}
"""Parameter -> the name to try before it is left out."""
NAMES = {
    "max_tokens": "max_tokens",
    "max_completion_tokens": "max_completion_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "seed": "seed",
    "response_format": r"response_format|json[ _]?schema|structured[ _]outputs?|guided[ _]\w+",
}
"""Optional parameter -> how an error page names it."""
LENGTHS = frozenset({"max_tokens", "max_completion_tokens"})
REFUSING_STATUSES = frozenset({400, 422, 500, 501})
"""Including 500: LiteLLM's proxy and llama.cpp's server have refused parameters with it."""

_REFUSAL = re.compile(
    r"unsupported|unrecogni[sz]ed|unknown|unexpected|unavailable|deprecated|"
    r"extra_forbidden|extra inputs|extra fields|cannot find field|"
    r"(?:\bnot|n't)(?: \w+)? (?:support|permit|allow|recogni[sz]e|accept|available|implement)|"
    r"cannot (?:both )?be (?:used|set|specified)"
)
_VALUE_REFUSAL = re.compile(
    # A model with one fixed sampling setting; a range without the value that is 'off' elsewhere.
    r"only .*\b(?:is|are) (?:allowed|supported)|must be (?:strictly|> ?0|in range \(0)"
)
"""Not applied to `LENGTHS`: a length above the context limit is not a refusal of the parameter."""
_SENTENCE_END = re.compile(r"[.!;]\s|\n|\}\s*,\s*\{")


@dataclass(frozen=True, eq=False)
class Request:
    """One question as it is sent to an endpoint that accepts every parameter."""

    parameters: Mapping[str, Any]
    """Fields of the request's body; the content of its one message is `[CONTENT]`."""
    content: Sequence[bytes]
    """JSON of the message's parts."""

    @cached_property
    def key(self) -> str:
        """Journal key of the reply; it does not depend on which parameters an endpoint refuses."""
        return hashlib.sha256(self.body(set())).hexdigest()

    def sent(self, without: Set[str]) -> dict[str, Any]:
        """The parameters to send to an endpoint that does not accept those in `without`."""
        sent = {name: value for name, value in self.parameters.items() if name not in without}
        for old, new in RENAMED.items():
            if old in without and old in self.parameters and new not in without:
                sent[new] = self.parameters[old]
        return sent

    def body(self, without: Set[str]) -> bytes:
        # Pictures are megabytes: they are inserted as they are, not escaped for each question.
        text = json.dumps(self.sent(without)).encode()
        before, _, after = text.partition(json.dumps(CONTENT).encode())
        return b"".join([before, b", ".join(self.content), after])


@dataclass
class Dialect:
    """What one endpoint does not accept. If it has accepted a parameter before, a refusal is taken
    to concern only that value."""

    names: set[str] = field(default_factory=set)
    values: set[tuple[str, str]] = field(default_factory=set)
    """(name, value as JSON)."""
    taken: set[str] = field(default_factory=set)
    """Parameters that the endpoint has accepted."""
    model_names: list[str] = field(default_factory=list)
    """Models other than `judge.model` that its replies have named."""
    proven: Request | None = None
    """The last request that got a reply."""

    def without(self, request: Request) -> frozenset[str]:
        """The parameters to leave out of `request`."""
        values = request.parameters.items()
        refused = {name for name, value in values if (name, json.dumps(value)) in self.values}
        return frozenset(self.names | refused)

    def learn(self, request: Request, without: Set[str], status: int) -> set[str]:
        """Remember the parameters left out of an answered `request`; returns the new ones."""
        if not 200 <= status < 300:
            return set()
        learnt = set(without - self.without(request))
        for name in learnt:
            if name in self.taken and name in request.parameters:
                self.values.add((name, json.dumps(request.parameters[name])))
            else:
                self.names.add(name)
        self.taken |= request.sent(without).keys() & NAMES.keys()
        return learnt


def in_words(news: Set[str], without: Set[str]) -> str:
    """'takes no seed, and max_completion_tokens for max_tokens'."""
    renamed = {old for old, new in RENAMED.items() if old in news and new not in without}
    parts = [f"no {name}" for name in sorted(news - renamed)]
    return "takes " + " and ".join([*parts, *(f"{RENAMED[old]} for {old}" for old in renamed)])


def refused_parameters(status: int, page: bytes, sent: Set[str]) -> set[str]:
    """Which of the optional parameters in `sent` an answer refuses; usually none."""
    if status not in REFUSING_STATUSES:
        return set()
    # Undo the escaped quotes and line ends of JSON that is nested in JSON.
    text = re.sub(r"\\+u00(?:22|27|60)", "'", page.decode("utf-8", "replace"))
    text = re.sub(r"\\+n", "\n", text).replace("\\", "").lower()
    refused: set[str] = set()
    for sentence in _SENTENCE_END.split(text):
        is_refusal = bool(_REFUSAL.search(sentence))
        if not is_refusal and not _VALUE_REFUSAL.search(sentence):
            continue
        mentioned = {
            name
            for name, pattern in NAMES.items()
            if name in sent and re.search(rf"(?<!\w)(?:{pattern})(?!\w)", sentence)
        }
        if not is_refusal:
            mentioned -= LENGTHS
        # The endpoint takes only one of the two: drop top_p, whose value 1.0 has no effect.
        if "top_p" in mentioned and "both" in sentence:
            mentioned -= {"temperature"}
        refused |= mentioned
    return refused
