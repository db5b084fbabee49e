"""What a judge is asked, and what its reply says."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from PIL import Image

from rl.config.loading import read_text
from rl.files import downscale, over_white, padded, png_bytes
from rl.printing import excerpt, scrub, without_lone_surrogates

# ---- reply ---------------------------------------------------------------------------------------
# Parses a judge's reply, which is untrusted: exactly the requested numbers, or unreadable.

MAX_REPLY_CHARS = 100_000
MAX_TOKEN_CHARS = 40
LOWEST_LOGPROB = -9999.0
"""What servers send for a probability of 0."""
LOGPROB_ROUNDING = 1e-3
"""How far a server's rounding may lift a log-prob above 0, nats."""

_PART = "\n[only a part, finish_reason {!r}]"
"""Last line of a reply that is not whole; the journal and the records keep it."""
_THOUGHT = re.compile(
    r"<(\w+:)?(think|thinking|thought|reasoning|scratchpad)>|\[think\]|\u25c1think\u25b7",
    re.IGNORECASE,
)
"""Opens what a judge writes for itself; numbers in it are no grade. The last two are Magistral's
and Kimi-VL's."""

Ranges = Mapping[str, tuple[float, float]]
"""Name of a score -> its lowest and highest value."""


class UnreadableReplyError(ValueError):
    """The reply is not what was asked for; the message does not quote the reply."""


class NoLogprobsError(UnreadableReplyError):
    """A chat completion without log-probs: the endpoint ignores the request for them."""


class Chat(NamedTuple):
    """What an answer says."""

    reply: Any
    """A chat completion's text, maybe ''; an images API's picture."""
    model: str | None
    """The model that the completion names."""
    tokens: tuple[int, int]
    """(of the prompt with its pictures, of the completion) under `usage`; 0 where it is missing."""


def read_chat(body: bytes, labels: Sequence[str] = ()) -> Chat:
    """Reads a chat completion.

    A reply above `MAX_REPLY_CHARS` is cut to one character more, which `read_scores` still refuses.
    One that the endpoint has cut or filtered gets a last line that says so (`refuse_part`).
    With `labels`, the reply is JSON of the first token and the labels' log-probs at the first
    position, nats: `{"token": "7", "logprobs": {"6": -1.5, "7": -0.3}}`.

    Raises `UnreadableReplyError`.
    """
    completion = parsed(body)
    match completion:
        case {"error": error} if error:
            raise UnreadableReplyError("an error beside the reply")
        case {"choices": [{"message": {"content": str() | None as content}} as choice, *_]}:
            pass
        case {"choices": [{"message": {"content": other}}, *_]}:
            raise UnreadableReplyError(f"{type(other).__name__} under content instead of a text")
        case _:
            raise UnreadableReplyError("no choices[0].message.content")
    reply = _label_reply(choice, labels) if labels else (content or "")
    reply = without_lone_surrogates(reply[: MAX_REPLY_CHARS + 1])
    # With labels one token is asked for, so every reply ends by its length.
    ended = choice.get("finish_reason")
    if ended == "content_filter" or (ended == "length" and not labels):
        reply += _PART.format(ended)
    model = completion.get("model")
    model_name = model if isinstance(model, str) and model else None
    return Chat(reply, model_name, tokens_of(completion, "prompt_tokens", "completion_tokens"))


def refuse_part(reply: str) -> None:
    """Raises `UnreadableReplyError` for a reply that the endpoint has cut or filtered."""
    for reason in ("length", "content_filter"):
        if reply.endswith(_PART.format(reason)):
            raise UnreadableReplyError(f"only a part of a reply (finish_reason {reason!r})")


def tokens_of(completion: Mapping[str, Any], read: str, written: str) -> tuple[int, int]:
    """Two numbers of tokens under `usage`; 0 where one is missing."""
    usage = completion.get("usage")
    found = usage if isinstance(usage, dict) else {}
    counts = (found.get(read), found.get(written))
    first, second = (n if type(n) is int and 0 < n < 10**9 else 0 for n in counts)
    return first, second


def _label_reply(choice: Any, labels: Sequence[str]) -> str:
    try:
        first = choice["logprobs"]["content"][0]
        entries = [first, *(first["top_logprobs"] or [])]
        pairs = [(entry["token"], entry["logprob"]) for entry in entries]
    except (LookupError, TypeError):
        raise NoLogprobsError("no log-probs of the first token") from None
    logprobs: dict[str, float] = {}
    for token, value in [(token, logprob_in(value)) for token, value in pairs if token in labels]:
        if logprobs.setdefault(token, value) != value:
            raise UnreadableReplyError(f'two log-probs of the label "{token}"')
    kept = {label: logprobs[label] for label in labels if label in logprobs}
    return json.dumps({"token": str(first["token"])[:MAX_TOKEN_CHARS], "logprobs": kept})


def logprob_in(value: Any) -> float:
    """`value`, which must be at most 0, nats. Raises `UnreadableReplyError`."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not value <= LOGPROB_ROUNDING:  # also NaN
        raise UnreadableReplyError("a log-prob that is no number of at most 0")
    return float(max(value, LOWEST_LOGPROB))  # an int may be too large for a float


def served_models(body: bytes) -> list[str] | None:
    """The ids in an answer to `/models`; None if it is not such a list."""
    try:
        names = [model["id"] for model in parsed(body)["data"]]
    except (UnreadableReplyError, LookupError, TypeError):
        return None
    return [scrub(name) for name in names] if all(isinstance(n, str) for n in names) else None


def read_scores(text: str, count: int, low: float, high: float) -> tuple[float, ...]:
    """The numbers of `{"score": [...]}`: exactly `count`, each in [low, high].

    Raises `UnreadableReplyError`.
    """
    scores = json_object(text).get("score")
    if not isinstance(scores, list):
        raise UnreadableReplyError('no list under "score"')
    if len(scores) != count:
        raise UnreadableReplyError(f'{len(scores)} numbers under "score", {count} asked for')
    return tuple(number_in(score, "score", low, high) for score in scores)


def read_fields(text: str, ranges: Ranges) -> tuple[float, ...]:
    """The numbers under the names in `ranges`, in that order, each in its range.

    Raises `UnreadableReplyError`.
    """
    fields = json_object(text)
    missing = [name for name in ranges if name not in fields]
    if missing:
        raise UnreadableReplyError(f"nothing under {', '.join(missing)}")
    return tuple(number_in(fields[name], name, *ranges[name]) for name in ranges)


def scores_schema(count: int, high: float) -> Mapping[str, Any]:
    """JSON schema of what `read_scores` reads with low = 0."""
    return _object_schema({"score": numbers_schema(count, 0, high)})


def numbers_schema(count: int, low: float, high: float) -> Mapping[str, Any]:
    """JSON schema of a list of `count` numbers."""
    number = {"type": "number", "minimum": low, "maximum": high}
    return {"type": "array", "items": number, "minItems": count, "maxItems": count}


def fields_schema(ranges: Ranges) -> Mapping[str, Any]:
    """JSON schema of what `read_fields` reads."""
    numbers = {n: {"type": "number", "minimum": r[0], "maximum": r[1]} for n, r in ranges.items()}
    return _object_schema(numbers)


def _object_schema(properties: Mapping[str, Any]) -> Mapping[str, Any]:
    # Reasoning first, so that the judge bases its numbers on it.
    return object_schema({"reasoning": {"type": "string"}, **properties})


def object_schema(properties: Mapping[str, Any]) -> Mapping[str, Any]:
    """JSON schema of an object with exactly these keys, which the judge writes in this order."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def scores_of_ten(schema: Mapping[str, Any], parsed: object) -> list[float]:
    """The numbers of a parsed reply to a question whose `schema` asks only for `score`, up to 10;
    [] for any other."""
    properties = schema.get("properties", {})
    score = properties.get("score", {})
    asks_only_for_it = properties.keys() <= {"reasoning", "score"}
    is_of_ten = asks_only_for_it and score.get("items", score).get("maximum") == 10
    return list(parsed) if is_of_ten and isinstance(parsed, tuple) else []


def parsed(body: bytes) -> Any:
    """Parse a body as JSON in UTF-8 (RFC 8259), whatever charset the headers claim."""
    try:
        return json.loads(body.decode("utf-8-sig"), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise _unreadable(error, "no JSON") from None


def _unreadable(error: Exception, otherwise: str) -> UnreadableReplyError:
    return error if isinstance(error, UnreadableReplyError) else UnreadableReplyError(otherwise)


def json_object(text: str) -> dict[str, Any]:
    """The only JSON object of a reply: bare, fenced, or with prose around it.

    Another opening brace after it makes the reply unreadable. A broken object is not searched for
    a complete one inside, which would be a guess. Raises `UnreadableReplyError`.
    """
    if len(text) > MAX_REPLY_CHARS:
        raise UnreadableReplyError(f"more than {MAX_REPLY_CHARS} characters long")
    text = _after_thoughts(text)
    start = text.find("{")
    if start < 0:
        raise UnreadableReplyError("no JSON object")
    # strict=False: raw newlines inside the reasoning are common and harm nothing.
    decoder = json.JSONDecoder(
        object_pairs_hook=_unique_keys, parse_constant=_refuse_constant, strict=False
    )
    try:
        parsed, end = decoder.raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        raise _unreadable(error, "broken JSON") from None
    if "{" in text[end:]:
        raise UnreadableReplyError("more than one JSON object")
    before, after = text[:start].rstrip(), text[end:].lstrip()
    if before.endswith(("[", "//", "/*", "#")) or after.startswith(("]", "}")):
        raise UnreadableReplyError("a JSON object inside something that was not asked for")
    return dict(parsed)


def _after_thoughts(text: str) -> str:
    """`text` from the end of the thoughts in front of its JSON object. A thought that does not end
    makes the reply unreadable. A tag inside the object is text."""
    while opened := _THOUGHT.search(text.partition("{")[0]):
        tag = opened[0]
        closing = re.escape(f"{tag[0]}/{tag[1:]}")  # `</think>`, `[/think]`
        closed = re.compile(closing, re.IGNORECASE).search(text, opened.end())
        if closed is None:
            raise UnreadableReplyError("a thought that does not end")
        text = text[closed.end() :]
    return text


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    parsed = dict(pairs)
    if len(parsed) != len(pairs):
        raise UnreadableReplyError("a key twice in the JSON object")
    return parsed


def _refuse_constant(name: str) -> NoReturn:
    raise UnreadableReplyError(f"{name} is not a number")


def number_in(value: Any, name: str, low: float, high: float) -> float:
    """`value`, which must be a number in [low, high]. Raises `UnreadableReplyError`."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UnreadableReplyError(f'{type(value).__name__} under "{name}" instead of a number')
    if not low <= value <= high:
        raise UnreadableReplyError(f'"{name}" outside {low:g}..{high:g}')
    return float(value)


# ---- question ------------------------------------------------------------------------------------
# Reads and fills prompt files, and encodes the texts and pictures of a question.

INSTRUCTION = "{instruction}"
"""The one placeholder of a prompt file."""

MIN_SIDE_PX = 28
"""Qwen2-VL's picture processors fail on a shorter side, and so do judges that are built on them."""
MAX_PROMPT_BYTES = 100_000
MAX_PATH_CHARS = 300


def read_prompt(path: str, default: Path | None, key: str) -> str:
    """The text of the prompt file `path`, or of the file `default` if `path` is ''.

    Raises ValueError naming `key` if `path` cannot be used, or lacks `{instruction}` although
    `default` has it; without `default`, `path` must have it.
    """
    default_text = default.read_text(encoding="utf-8").strip() if default else INSTRUCTION
    text = default_text
    if path:
        try:
            text = read_text(path, MAX_PROMPT_BYTES).strip()
        except ValueError as error:
            name = excerpt(path, MAX_PATH_CHARS)
            raise ValueError(f"{key}: the prompt file {name} {error}") from None
    if not text:
        raise ValueError(f"{key}: the prompt file {path} is empty")
    if INSTRUCTION in default_text and INSTRUCTION not in text:
        raise ValueError(
            f"{key}: the prompt file {path} has no {INSTRUCTION}; put it where the instruction goes"
        )
    return text


def fill_prompt(text: str, instruction: str) -> str:
    """`text` with the user's instruction inserted. A '<' in it that begins one of the file's own
    tags (`</instruction>`) is escaped, so that it cannot close a tag. Other braces of `text` (JSON
    examples) stay."""
    for tag in set(re.findall(r"</?(\w+)>", text)):
        instruction = re.sub(rf"(?i)<(?=\s*/?\s*{tag}\b)", "&lt;", instruction)
    return text.replace(INSTRUCTION, instruction)


def picture_part(image: Image.Image, side_px: int) -> bytes:
    """The picture as a JSON part of a request, a data URL in PNG: JPEG would add artefacts, which
    the judge might penalise. Its longer side is at most `side_px`; a side below `MIN_SIDE_PX` is
    padded with white."""
    if max(image.size) > side_px or min(image.size) < MIN_SIDE_PX:
        image = padded(downscale(over_white(image), side_px), MIN_SIDE_PX)
    url = "data:image/png;base64," + base64.b64encode(png_bytes(image)).decode("ascii")
    return json.dumps({"type": "image_url", "image_url": {"url": url}}).encode()


async def encoded(part: str | Image.Image, side_px: int) -> bytes:
    """A part of a question as JSON for a request; a picture is encoded in a thread."""
    if isinstance(part, str):
        return json.dumps({"type": "text", "text": part}).encode()
    return await asyncio.to_thread(picture_part, part, side_px)


# ---- labels --------------------------------------------------------------------------------------
# Scores from the probabilities of one-token labels (Edit-R1, 2510.16888; Z-Reward, 2606.09076).

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
    probability 0: it is less likely than all tokens that were returned.

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
