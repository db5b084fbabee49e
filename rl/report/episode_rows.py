"""Rows of a data page from episodes and held-out records; values of a wrong type are dropped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from rl.config.shipped import located
from rl.report.reading import Record, number, other_sources, picture, picture_of, words_of
from rl.text.untrusted import without_lone_surrogates


@dataclass(frozen=True)
class Limits:
    """How much of an episode a page holds."""

    text_chars: int
    """Limit for an instruction, a completion or a cause of failure."""
    reply_chars: int
    num_tokens: int
    """Limit for tokens with their log-probs."""


WHOLE = Limits(20_000, 20_000, 20_000)
LEVELS = (WHOLE, Limits(4000, 2000, 1024), Limits(2000, 800, 256), Limits(1000, 300, 64))
"""Tried in turn until a page is small enough."""
_HALF = "\ufffd"
_MAX_JOINED = 8
"""Most tokens that can make one character together."""


class Pieces:
    """Decodes single tokens of a run's policy, where its tokenizer is on this machine; no
    network."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """`config`: as the run's `config.json` holds it."""
        self._tokenizer = _tokenizer(config)

    def of(self, token_ids: Sequence[int]) -> list[str] | None:
        """The text of each token; if several make one character, the first has it and the others
        ''. None if the texts are not known."""
        if self._tokenizer is None:
            return None
        texts: list[str] = []
        waiting: list[int] = []
        for token in token_ids:
            waiting.append(token)
            text = self._decoded(waiting)
            if text is None:
                return None
            if _HALF in text and len(waiting) < _MAX_JOINED:
                continue
            texts += [text, *[""] * (len(waiting) - 1)]
            waiting = []
        return texts + [self._decoded(waiting) or "", *[""] * (len(waiting) - 1)] * bool(waiting)

    def _decoded(self, token_ids: Sequence[int]) -> str | None:
        try:
            return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))
        except (OverflowError, TypeError, ValueError):  # ids that no tokenizer has
            return None


def _tokenizer(config: Mapping[str, Any]) -> Any:
    policy = config.get("policy")
    path = policy.get("model_path") if isinstance(policy, Mapping) else None
    if not isinstance(path, str):
        return None
    try:
        from tokenizers import Tokenizer

        file = Path(located(path)) / "tokenizer.json"
        if not file.is_file():
            from huggingface_hub import try_to_load_from_cache

            found = try_to_load_from_cache(path, "tokenizer.json")
            if not isinstance(found, str):
                return None
            file = Path(found)
        return Tokenizer.from_file(str(file))
    # tokenizers raises bare Exceptions for an unreadable file; ImportError: it is not installed.
    except Exception:
        return None


def text(value: object, max_chars: int) -> str:
    """`value`, cut at `max_chars`; '' where it is no text."""
    if not isinstance(value, str):
        return ""
    whole = without_lone_surrogates(value[: max_chars + 1])
    return whole if len(value) <= max_chars else whole[:max_chars] + " [...]"


def short(value: object, digits: int = 4) -> float | None:
    found = number(value)
    return None if found is None or found != found or abs(found) > 1e12 else round(found, digits)


def groups_of(rows: Iterable[Record]) -> list[list[Record]]:
    """Splits rows into groups; the rows of one group must be adjacent."""
    by_group = groupby(rows, lambda row: (row.get("rank"), row.get("group_id")))
    return [list(rows_G) for _, rows_G in by_group]


def part_names(rows: Iterable[Record]) -> list[str]:
    """The names of the reward's parts, in the order in which they come up."""
    names: dict[str, None] = {}
    for row in rows:
        parts = row.get("parts")
        names |= dict.fromkeys(parts if isinstance(parts, Mapping) else ())
    return [str(name) for name in names]


def _parts(row: Record, names: Sequence[str]) -> list[float | None]:
    parts = row.get("parts")
    return [short(parts.get(name)) if isinstance(parts, Mapping) else None for name in names]


def group_row(
    rows_G: Sequence[Record], names: Sequence[str], run_dir: Path, pieces: Pieces, limits: Limits
) -> dict[str, Any]:
    """A whole group, as its own view shows it."""
    first = rows_G[0]
    bare = first.get("bare")
    there = partial(picture_of, run_dir)
    return {
        "id": text(first.get("sample_id"), 300),
        "cat": text(first.get("category"), 200),
        "say": text(first.get("instruction"), limits.text_chars),
        **_sources(first, there),
        "goal": there(first.get("target_file")),
        "of": [_member(row, names, there, pieces, limits) for row in rows_G],
        "bare": _member(bare, names, there, pieces, limits) if isinstance(bare, Mapping) else None,
    }


def _sources(row: Record, there: Callable[[object], str | None]) -> dict[str, Any]:
    """`src`: the source picture; `others`: where there are several, those after it, null for one
    that is not there."""
    others = [there(file) for file in other_sources(row)]
    return {"src": there(row.get("source_file"))} | ({"others": others} if others else {})


def _member(
    row: Record,
    names: Sequence[str],
    there: Callable[[object], str | None],
    pieces: Pieces,
    limits: Limits,
) -> dict[str, Any]:
    """One completion of training or evaluation. `there`: a picture's name, None if missing."""
    replies = row.get("replies")
    replies = replies if isinstance(replies, Mapping) else {}
    member: dict[str, Any] = {
        "text": text(words_of(row), limits.text_chars),
        "think": text(row.get("thought"), limits.text_chars),
        "end": text(row.get("finish"), 40),
        "st": text(row.get("status"), 40),
        "why": text(row.get("failure"), limits.text_chars),
        "r": short(row.get("reward")),
        "adv": short(row.get("advantage"), 3),
        "seed": row.get("noise_seed") if isinstance(row.get("noise_seed"), int) else None,
        "s": short(row.get("judge_s"), 3),
        "parts": _parts(row, names),
        "img": there(row.get("image_file")),
        "said": {
            text(name, 100): [text(reply, limits.reply_chars) for reply in said]
            for name, said in replies.items()
            if isinstance(said, Sequence) and not isinstance(said, str)
        },
    }
    return member | _tokens(row, pieces, limits)


def _tokens(row: Record, pieces: Pieces, limits: Limits) -> dict[str, Any]:
    """`tok`: texts, or ids where no tokenizer is at hand; `lp`: hundredths of nats; `cut`: how many
    are left out."""
    ids, logprobs = row.get("token_ids"), row.get("sampler_logprobs")
    if not isinstance(ids, list) or not isinstance(logprobs, list):
        return {}
    if not all(type(token) is int for token in ids):
        return {}
    kept = ids[: limits.num_tokens]
    hundredths = [short(logprob, 2) for logprob in logprobs[: len(kept)]]
    found: dict[str, Any] = {
        "tok": pieces.of(kept) or kept,
        "lp": [None if value is None else round(100 * value) for value in hundredths],
    }
    if isinstance(row.get("forced"), list) and any(row["forced"]):
        found["forced"] = [int(bool(forced)) for forced in row["forced"][: len(kept)]]
    return found | ({"cut": len(ids) - len(kept)} if len(kept) < len(ids) else {})


def finding_row(g: int, rows_G: Sequence[Record], names: Sequence[str]) -> list[Any]:
    """What groups are searched by: index, category, instruction, mean, minimum and maximum reward,
    standard deviation, number of episodes by status, means of the parts."""
    first = rows_G[0]
    rewards = [value for row in rows_G if (value := short(row.get("reward"))) is not None]
    status: dict[str, int] = {}
    for row in rows_G:
        name = text(row.get("status"), 40)
        status[name] = status.get(name, 0) + 1
    columns = [_parts(row, names) for row in rows_G]
    means = [
        round(fmean(graded), 4) if (graded := [v for v in column if v is not None]) else None
        for column in zip(*columns, strict=True)
    ]
    return [
        g,
        text(first.get("category"), 60),
        text(first.get("instruction"), 160),
        round(fmean(rewards), 4) if rewards else None,
        min(rewards, default=None),
        max(rewards, default=None),
        round(pstdev(rewards), 4) if rewards else None,
        status,
        means,
    ]


def record_row(
    record: Record,
    names: Sequence[str],
    folder: Path,
    stock: str | None,
    pieces: Pieces,
    limits: Limits,
) -> dict[str, Any]:
    """A held-out sample. `stock`: the stock arm's picture of it, in the folder of that arm."""
    there = partial(picture, folder)
    return {
        **_member(record, names, there, pieces, limits),
        "id": text(str(record["id"]), 300),
        "cat": text(record.get("category"), 200),
        "say": text(record.get("instruction"), limits.text_chars),
        "ref": text(record.get("reference"), limits.text_chars),
        "bare": short(record.get("bare_reward")),
        "stock": short(record.get("stock_reward")),
        **_sources(record, there),
        "bimg": there(record.get("bare_file")),
        "simg": stock,
    }
