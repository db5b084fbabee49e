"""Parses a judge's reply, which is untrusted: exactly the requested numbers, or unreadable."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from rl.text.scrub import scrub
from rl.text.untrusted import without_lone_surrogates

MAX_REPLY_CHARS = 100_000

Ranges = Mapping[str, tuple[float, float]]
"""Name of a score -> its lowest and highest value."""


class UnreadableReplyError(ValueError):
    """The reply is not what was asked for; the message does not quote the reply."""


def read_chat(body: bytes) -> tuple[str, str | None]:
    """(the judge's reply in a chat completion, maybe ''; the model that the completion names).

    A reply above `MAX_REPLY_CHARS` is cut to one character more, which `read_scores` still refuses.
    Raises `UnreadableReplyError`.
    """
    completion = parsed(body)
    if isinstance(completion, dict) and completion.get("error"):
        raise UnreadableReplyError("an error beside the reply")
    try:
        content = completion["choices"][0]["message"]["content"]
    except (LookupError, TypeError):
        raise UnreadableReplyError("no choices[0].message.content") from None
    if not isinstance(content, str | None):
        raise UnreadableReplyError(f"{type(content).__name__} under content instead of a text")
    model = completion.get("model")
    model_name = model if isinstance(model, str) and model else None
    return without_lone_surrogates((content or "")[: MAX_REPLY_CHARS + 1]), model_name


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


def scores_schema(count: int, low: float, high: float) -> Mapping[str, Any]:
    """JSON schema of what `read_scores` reads."""
    number = {"type": "number", "minimum": low, "maximum": high}
    scores = {"type": "array", "items": number, "minItems": count, "maxItems": count}
    return _object_schema({"score": scores})


def fields_schema(ranges: Ranges) -> Mapping[str, Any]:
    """JSON schema of what `read_fields` reads."""
    return _object_schema(
        {
            name: {"type": "number", "minimum": low, "maximum": high}
            for name, (low, high) in ranges.items()
        }
    )


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
