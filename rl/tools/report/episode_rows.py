"""Makes a data page's rows from episodes and held-out records; drops values of a wrong type."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from rl.config.loading import located
from rl.printing import without_lone_surrogates
from rl.tools.report.reading import Record, number, picture, picture_of, source_places, words_of


@dataclass(frozen=True)
class Limits:
    """How much of an episode a page keeps."""

    text_chars: int
    """Limit for an instruction, a completion or a cause of failure."""
    reply_chars: int
    num_tokens: int
    """Limit for tokens with their log-probs."""


WHOLE = Limits(20_000, 20_000, 20_000)
LEVELS = (WHOLE, Limits(4000, 2000, 1024), Limits(2000, 800, 256), Limits(1000, 300, 64))
"""Tried in order until a page is small enough."""
_INCOMPLETE = "\ufffd"
_MAX_JOINED = 8
"""Maximum number of tokens that form one character together."""


class Pieces:
    """Decodes single tokens of a run's policy, if its tokenizer is on this machine. Makes no
    network requests."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """`config`: the content of the run's `config.json`."""
        self._tokenizer = _tokenizer(config)

    def of(self, token_ids: Sequence[int]) -> list[str] | None:
        """The text of each token; if several form one character, the first gets it and the others
        ''. None if the texts are unknown."""
        if self._tokenizer is None:
            return None
        texts: list[str] = []
        pending: list[int] = []
        for token in token_ids:
            pending.append(token)
            text = self._decoded(pending)
            if text is None:
                return None
            if _INCOMPLETE in text and len(pending) < _MAX_JOINED:
                continue
            texts += [text, *[""] * (len(pending) - 1)]
            pending = []
        return texts + [self._decoded(pending) or "", *[""] * (len(pending) - 1)] * bool(pending)

    def _decoded(self, token_ids: Sequence[int]) -> str | None:
        try:
            return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))
        except (OverflowError, TypeError, ValueError):  # ids outside the vocabulary
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

            cached = try_to_load_from_cache(path, "tokenizer.json")
            if not isinstance(cached, str):
                return None
            file = Path(cached)
        return Tokenizer.from_file(str(file))
    # tokenizers raises bare Exceptions for an unreadable file; ImportError: it is not installed.
    except Exception:
        return None


def text(value: object, max_chars: int) -> str:
    """`value`, cut at `max_chars`; '' if it is not a string."""
    if not isinstance(value, str):
        return ""
    kept = without_lone_surrogates(value[: max_chars + 1])
    return kept if len(value) <= max_chars else kept[:max_chars] + " [...]"


def short(value: object, digits: int = 4) -> float | None:
    num = number(value)
    return None if num is None or num != num or abs(num) > 1e12 else round(num, digits)


def groups_of(rows: Iterable[Record]) -> list[list[Record]]:
    """Splits rows into groups; the rows of one group must be adjacent."""
    by_group = groupby(rows, lambda row: (row.get("rank"), row.get("group_id")))
    return [list(rows_G) for _, rows_G in by_group]


def part_names(rows: Iterable[Record]) -> list[str]:
    """The names of the reward's parts, in the order of their first occurrence."""
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
    """A group with all its completions, for the page's group view."""
    first = rows_G[0]
    bare = first.get("bare")
    file_of = partial(picture_of, run_dir)
    bare_row = _member(bare, names, file_of, pieces, limits) if isinstance(bare, Mapping) else None
    return {
        "id": text(first.get("sample_id"), 300),
        "cat": text(first.get("category"), 200),
        "say": text(first.get("instruction"), limits.text_chars),
        **_sources(first, file_of),
        "goal": file_of(first.get("target_file")) or file_of(first.get("target_thumbnail")),
        "rank": first.get("rank") if type(first.get("rank")) is int else 0,
        "of": [_member(row, names, file_of, pieces, limits) for row in rows_G],
        "bare": bare_row,
    }


def _sources(row: Record, file_of: Callable[[object], str | None]) -> dict[str, Any]:
    """`src`: the first source picture; `others`: further ones, if any; null for a missing file."""
    src, *others = [file_of(file) or file_of(small) for file, small in source_places(row)]
    return {"src": src} | ({"others": others} if others else {})


def _member(
    row: Record,
    names: Sequence[str],
    file_of: Callable[[object], str | None],
    pieces: Pieces,
    limits: Limits,
) -> dict[str, Any]:
    """One completion of training or evaluation. `file_of`: a picture's path, or None."""
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
        "img": file_of(row.get("image_file")) or file_of(row.get("thumbnail")),
        "said": {
            text(name, 100): [text(reply, limits.reply_chars) for reply in texts]
            for name, texts in replies.items()
            if isinstance(texts, Sequence) and not isinstance(texts, str)
        },
    }
    regions = _regions(row.get("regions"))
    return member | ({"regions": regions} if regions else {}) | _tokens(row, pieces, limits)


def _regions(by_reward: object) -> list[list[Any]]:
    """[label, left, top, right, bottom] of each region, in shares of the picture's sides."""
    named = by_reward.values() if isinstance(by_reward, Mapping) else ()
    rows = []
    for region in (each for regions in named if isinstance(regions, list) for each in regions):
        match region:
            case {"label": str(label), "box": [_, _, _, _] as corners}:
                box = [short(corner) for corner in corners]
                if all(corner is not None and 0 <= corner <= 1 for corner in box):
                    rows.append([text(label, 200), *box])
    return rows


def _tokens(row: Record, pieces: Pieces, limits: Limits) -> dict[str, Any]:
    """`tok`: texts, or ids without a tokenizer; `lp`: hundredths of nats; `cut`: number of tokens
    left out."""
    ids, logprobs = row.get("token_ids"), row.get("sampler_logprobs")
    if not isinstance(ids, list) or not isinstance(logprobs, list):
        return {}
    if not all(type(token) is int for token in ids):
        return {}
    kept = ids[: limits.num_tokens]
    hundredths = [short(logprob, 2) for logprob in logprobs[: len(kept)]]
    fields: dict[str, Any] = {
        "tok": pieces.of(kept) or kept,
        "lp": [None if value is None else round(100 * value) for value in hundredths],
    }
    if isinstance(row.get("forced"), list) and any(row["forced"]):
        fields["forced"] = [int(bool(forced)) for forced in row["forced"][: len(kept)]]
    return fields | ({"cut": len(ids) - len(kept)} if len(kept) < len(ids) else {})


def finding_row(g: int, rows_G: Sequence[Record], names: Sequence[str], run_dir: Path) -> list[Any]:
    """The values by which groups are filtered: index, category, instruction, mean, minimum and
    maximum reward, standard deviation, number of episodes by status, means of the parts, pictures
    (the source, the completion with the largest reward, and that with the smallest)."""
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
        _list_pictures(rows_G, run_dir),
    ]


def _list_pictures(rows_G: Sequence[Record], run_dir: Path) -> list[str]:
    """At most three distinct pictures, thumbnails where there are any."""
    graded = [row for row in rows_G if number(row.get("reward")) is not None] or rows_G[:1]
    graded = sorted(graded, key=lambda row: number(row.get("reward")) or 0.0)
    source_file, small = source_places(rows_G[0])[0]
    places = [small or source_file]
    places += [row.get("thumbnail") or row.get("image_file") for row in (graded[-1], graded[0])]
    return [p for p in dict.fromkeys(map(partial(picture_of, run_dir), map(str, places))) if p]


def histogram(values: Iterable[float | None], step: float, first: float, num: int) -> list[int]:
    """Counts of the values by bin; bin i is centred at `first` + i `step`, the outermost bins also
    count what lies beyond them."""
    counts = [0] * num
    for value in values:
        if value is not None:
            counts[min(num - 1, max(0, round((value - first) / step)))] += 1
    return counts


def record_row(
    record: Record,
    names: Sequence[str],
    folder: Path,
    stock: str | None,
    pieces: Pieces,
    limits: Limits,
) -> dict[str, Any]:
    """A held-out sample. `stock`: the file of the stock arm's picture, in `<run>/stock`."""
    file_of = partial(picture, folder)
    return {
        **_member(record, names, file_of, pieces, limits),
        "id": text(str(record["id"]), 300),
        "cat": text(record.get("category"), 200),
        "say": text(record.get("instruction"), limits.text_chars),
        "ref": text(record.get("reference"), limits.text_chars),
        "bare": short(record.get("bare_reward")),
        "stock": short(record.get("stock_reward")),
        **_sources(record, file_of),
        "bimg": file_of(record.get("bare_file")),
        "simg": stock,
    }
