"""Reads a run folder: iterations, curves, episodes as rows of the page."""

from __future__ import annotations

import fcntl
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby, zip_longest
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from rl.config.loading import find_config, located
from rl.config.schema import load_config
from rl.files import private_folder, read_object, read_rows
from rl.printing import without_lone_surrogates
from rl.record.checkpoint import format_problem
from rl.record.run_summary import not_a_run
from rl.run.metric_table import doc_of

# ---- reading -------------------------------------------------------------------------------------
# Reads a run folder, even an incomplete or damaged one.

Record = Mapping[str, Any]
CONFIG_ENDINGS = (".jsonnet", ".libsonnet", ".json")
_MAX_ITERATION = 10**9
_MAX_NUMBER = 1e100
_EPISODES = re.compile(r"it_(\d{6,})\.rank(\d+)\.jsonl")
_EVALUATION = re.compile(r"it_(\d{6,})")
MAX_SOURCES = 32
"""Maximum number of source pictures on the page per sample; no policy reads that many."""
_PICTURE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*(/[A-Za-z0-9_-][A-Za-z0-9_.-]*)*")
"""A path that stays below its folder, and that a browser cannot mistake for a URL."""
_BOX = re.compile(r"xywh=\d{1,5},\d{1,5},[1-9]\d{0,4},[1-9]\d{0,4}")
"""A media fragment that selects a part of a picture, in px."""


@dataclass(frozen=True)
class Evaluation:
    """One held-out evaluation, as `rl/run/evaluation.py` wrote it."""

    iteration: int
    """Number of iterations done when the evaluation was made."""
    folder: Path
    records: Mapping[str, Record]
    """Sample id -> record."""


def find_run(run: str, overrides: Sequence[str] = ()) -> Path:
    """`run` itself if it is a folder, else the run folder of the config `run`. Raises ValueError if
    there is no readable run; its message names the nearest."""
    path = Path(run)
    if not path.is_dir() and (path.suffix not in CONFIG_ENDINGS or find_config(path) is None):
        raise ValueError(not_a_run(path))
    if path.is_dir() and overrides:
        raise ValueError(f"{overrides[0]}: {run} is a run; only a config takes key=value")
    run_dir = path if path.is_dir() else load_config(run, list(overrides)).run_dir
    if not (run_dir / "metrics.jsonl").is_file():
        if run_dir != path:
            raise ValueError(f"{run} has not been run: {run_dir} has no metrics.jsonl")
        raise ValueError(not_a_run(run_dir))
    if problem := format_problem(run_dir):
        raise ValueError(problem)
    return run_dir


def named_rows(path: Path, key: str) -> tuple[list[dict[str, Any]], list[int]]:
    """The rows of a JSONL file that have `key`, and the numbers (from 1) of its damaged lines, such
    as a last line cut short when the process was killed."""
    rows, damaged = read_rows(path)
    keyed = [row for row in rows if key in row]
    if key == "iteration":
        keyed = [row for row in keyed if type(it := row[key]) is int and 0 <= it <= _MAX_ITERATION]
    return keyed, damaged


def read_named(path: Path, key: str) -> list[dict[str, Any]]:
    """The rows of `named_rows`; prints the numbers of damaged lines to stderr."""
    rows, damaged = named_rows(path, key)
    if damaged:
        numbers = ", ".join(map(str, damaged))
        print(f"{path}: damaged lines are left out: {numbers}", file=sys.stderr)
    return rows


def evaluation_folders(run_dir: Path) -> dict[int, Path]:
    """Number of iterations done -> folder, in order, for all evaluations that have records."""
    folder_of = {
        int(match[1]): folder
        for folder in run_dir.glob("evaluation/it_*")
        if (match := _EVALUATION.fullmatch(folder.name)) and (folder / "records.jsonl").exists()
    }
    return dict(sorted(folder_of.items()))


def read_evaluations(run_dir: Path, until: int = _MAX_ITERATION) -> list[Evaluation]:
    """The first and the last evaluation made after at most `until` iterations, or fewer if
    there are fewer. Damaged lines are left out; the page's alarms count them."""
    folders = [(it, folder) for it, folder in evaluation_folders(run_dir).items() if it <= until]
    return [
        Evaluation(
            iteration,
            folder,
            {str(row["id"]): row for row in named_rows(folder / "records.jsonl", "id")[0]},
        )
        for iteration, folder in [*folders[:1], *folders[1:][-1:]]
    ]


def episode_files(run_dir: Path) -> dict[int, list[Path]]:
    """Iteration -> its episode files, one per rank; iterations and ranks are in order."""
    files_of: dict[int, list[tuple[int, Path]]] = {}
    for path in run_dir.glob("episodes/it_*.jsonl"):
        if match := _EPISODES.fullmatch(path.name):
            files_of.setdefault(int(match[1]), []).append((int(match[2]), path))
    return {it: [path for _, path in sorted(files)] for it, files in sorted(files_of.items())}


def read_config(run_dir: Path) -> dict[str, Any]:
    """`config.json` of a run; {} if there is none, or no object in it."""
    try:
        return read_object(run_dir / "config.json") or {}
    except FileNotFoundError:
        return {}


def picture(folder: Path, file: object) -> str | None:
    """`file` if it is an existing picture below `folder`, reached without symlinks; else None."""
    if not isinstance(file, str) or not _PICTURE.fullmatch(file):
        return None
    names = file.split("/")
    steps = [folder.joinpath(*names[:count]) for count in range(1, len(names) + 1)]
    if folder.parent.name == "evaluation":
        steps.append(folder)
    if any(step.is_symlink() for step in steps):
        return None
    return file if steps[len(names) - 1].is_file() else None


def picture_of(run_dir: Path, place: object) -> str | None:
    """`place` if it is a picture below a run folder, whose folder `images` may be a symlink, or a
    part of one (`rl/record/run_record.py`); else None."""
    if not isinstance(place, str):
        return None
    file, mark, box = place.partition("#")
    if not _PICTURE.fullmatch(file) or (mark and not _BOX.fullmatch(box)):
        return None
    top, _, path_below = file.partition("/")
    return place if path_below and picture(run_dir / top, path_below) else None


def source_places(record: Record) -> list[tuple[object, object]]:
    """(file, thumbnail) of each source picture that an episode's record names, unchecked."""
    small = record.get("source_thumbnails")
    small = small[:MAX_SOURCES] if isinstance(small, list) else []
    return list(zip_longest([record.get("source_file"), *other_sources(record)], small))


def other_sources(record: Record) -> list[object]:
    """The source pictures that a record names, except the first."""
    files = record.get("other_source_files")
    return files[:MAX_SOURCES] if isinstance(files, list) else []


def shown_of(record: Record) -> list[str]:
    """Hashes of a held-out sample's pictures; [] in an older run's record."""
    hashes = record.get("shown")
    kept = hashes[:MAX_SOURCES] if isinstance(hashes, list) else []
    return [digest for digest in kept if isinstance(digest, str)]


def is_control(config: Mapping[str, Any]) -> bool:
    """Whether a run's config shuffles its rewards."""
    algorithm = config.get("algorithm")
    return isinstance(algorithm, Mapping) and bool(algorithm.get("shuffle_rewards"))


def words_of(record: Record) -> object:
    """What the policy wrote, without its thought if there was one."""
    return record.get("words", record.get("completion"))


def number(value: object) -> float | None:
    """`value` if it is a number small enough for sums to stay finite, else None; bools count."""
    if not isinstance(value, (int, float)) or not abs(value) <= _MAX_NUMBER:
        return None
    return float(value)


# ---- curves --------------------------------------------------------------------------------------
# Names a run's curves and computes their points.

MAX_POINTS = 400
"""Maximum number of points of a line; a longer one is averaged over equal spans."""
Points = list[tuple[float, float]]
"""(iteration, value)."""


@dataclass(frozen=True)
class Line:
    """One metric of a curve."""

    metric: str
    label: str
    style: str = "main"
    """'main', 'dash', 'dot' or 'dashdot'."""


@dataclass(frozen=True)
class Curve:
    """One chart with one to five lines."""

    title: str
    lines: Sequence[Line]
    top: float | None = None
    """Upper end of the y axis; None = the largest value."""


CURVES = (
    Curve(
        "Held-out reward",
        (
            Line("eval/reward", "held-out prompts"),
            Line("eval/stock_reward", "the untrained system", "dash"),
            Line("eval/bare_reward", "the user's own words", "dot"),
            Line("eval_reference/reward", "given reference descriptions", "dashdot"),
        ),
        1.0,
    ),
    Curve(
        "Reward in training",
        (Line("reward/mean", "sampled"), Line("bare_reward", "the user's own words", "dot")),
        1.0,
    ),
    Curve("Gain over the untrained system", (Line("eval/gain_over_stock", "held-out prompts"),)),
    Curve("Gain of thinking", (Line("eval/gain_of_thought", "held-out prompts"),)),
    Curve(
        "KL to the start", (Line("kl/reference_k1", "k1", "dash"), Line("kl/reference_k3", "k3"))
    ),
    Curve("Entropy", (Line("policy/entropy", "per token"),)),
    Curve(
        "Completion length",
        (
            Line("tokens/completion_mean", "mean"),
            Line("tokens/completion_max", "longest", "dot"),
            Line("thought/tokens_mean", "thought, mean", "dash"),
        ),
    ),
    Curve("Mismatch of engine and trainer", (Line("mismatch/k3", "k3"),)),
    Curve(
        "Groups without spread of rewards",
        (Line("groups/zero_spread", "without spread"), Line("groups/dead", "dead", "dash")),
        1.0,
    ),
    Curve(
        "Not graded",
        (
            Line("status/ungraded", "ungraded"),
            Line("status/policy_failed", "policy failed", "dash"),
            Line("eval/ungraded", "held-out, ungraded", "dot"),
            Line("status/unreadable", "unreadable reply", "dashdot"),
        ),
    ),
    Curve(
        "Drift: reward that fixed prompts lost",
        (
            Line("drift/bare_fall", "the user's own words"),
            Line("drift/reference_fall", "reference descriptions", "dash"),
        ),
    ),
    Curve(
        "Pictures that equal their source",
        (
            Line("pictures/copies", "share"),
            Line("pictures/rewarded_copies", "with a reward of at least 0.5", "dash"),
        ),
    ),
    Curve("Similarity to the source", (Line("pictures/similarity", "mean"),)),
    Curve("Sharpness against the source", (Line("pictures/sharpness", "mean"),)),
    Curve("Saturation against the source", (Line("pictures/saturation", "mean"),)),
    Curve(
        "What the reward pays for (correlation within groups)",
        (
            Line("reward/correlation/similarity", "similarity"),
            Line("reward/correlation/sharpness", "sharpness", "dash"),
            Line("reward/correlation/saturation", "saturation", "dot"),
            Line("reward/correlation/length", "length", "dashdot"),
        ),
    ),
    Curve(
        "Share of the reward's variance in a group",
        (Line("reward/noise_variance_share", "rendering and judge"),),
        1.0,
    ),
    Curve(
        "Render pool",
        (
            Line("renderer/pool_workers", "workers that could draw"),
            Line("renderer/pool_restarts", "workers lost", "dot"),
        ),
    ),
    Curve("Drift: how far states moved", (Line("drift/state_l2", "of their norm"),)),
    Curve("Distinct completions in a group", (Line("groups/distinct_completions", "share"),), 1.0),
)


def points(metrics: Sequence[Record], name: str) -> Points:
    """(iteration, value) of each row in which the metric `name` is a number."""
    return [
        (float(row["iteration"]), value)
        for row in metrics
        if (value := number(row.get(name))) is not None and number(row["iteration"]) is not None
    ]


def curve_data(metrics: Sequence[Record], num_pictures: int | None) -> dict[str, Any]:
    """All metrics of a run as columns, for the page's charts (`page/charts.js`), in at most
    `MAX_POINTS` rows; a longer run's are averaged over equal spans, except the first and the last.
    `num_pictures`: pictures per iteration, if known.

    `it`: iterations; `hours`: hours since the start; `pictures`: pictures drawn; `of`: metric ->
    value or None per row; `span`: iterations that a row averages; `docs`: metric -> (unit,
    meaning).
    """
    rows = [row for row in metrics if number(row["iteration"]) is not None]
    span = max(1, -(-(len(rows) - 2) // (MAX_POINTS - 2)))
    middle = [rows[i : i + span] for i in range(1, len(rows) - 1, span)]
    spans = [rows[:1], *middle, rows[-1:]] if len(rows) > 1 else [rows] * len(rows)
    iterations = [_short(fmean(float(row["iteration"]) for row in each)) for each in spans]
    seconds = [sum(number(row.get("time/iteration_s")) or 0.0 for row in each) for each in spans]
    names = sorted({name for row in rows for name in row} - {"iteration"})
    columns = {name: [mean(each, name) for each in spans] for name in names}
    documented = ((name, doc_of(name)) for name in names)
    return {
        "it": iterations,
        "hours": [_short(total / 3600) for total in accumulate(seconds)],
        "pictures": num_pictures and [it * num_pictures for it in iterations],
        "of": {name: column for name, column in columns.items() if set(column) != {None}},
        "span": span,
        "docs": {name: [doc.unit, doc.meaning] for name, doc in documented if doc},
    }


def mean(rows: Sequence[Record], name: str) -> float | None:
    """Mean of a metric in the rows that have it, to six digits; None if no row has it."""
    values = [value for row in rows if (value := number(row.get(name))) is not None]
    return _short(fmean(values)) if values else None


def _short(value: float) -> float:
    """Six significant digits; whole numbers as such, which take fewer characters."""
    rounded = float(f"{value:.6g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded


# ---- folder --------------------------------------------------------------------------------------
# Locks `<run>/report/` for one process at a time, and refuses symbolic links in it.

MAX_WAIT_S = 30.0
"""Longest wait for another report on this run."""
_POLL_S = 0.1


class BusyError(ValueError):
    """Another process writes the same page, or follows the same run."""


@contextmanager
def for_one_report(folder: Path) -> Iterator[None]:
    """Lock the folder against other reports. Raises ValueError if the folder, its `data` or an
    entry of either is a symbolic link, BusyError if it stays locked for `MAX_WAIT_S`."""
    for inner in (folder, folder / "data"):
        entries = inner.iterdir() if inner.is_dir() and not inner.is_symlink() else ()
        for path in (inner, *entries):
            if path.is_symlink():
                raise ValueError(
                    f"{path} is a link, which might lead out of the run folder; remove it"
                )
    private_folder(folder)
    with locked(folder / ".lock", MAX_WAIT_S):
        yield


@contextmanager
def locked(file: Path, wait_s: float) -> Iterator[None]:
    """Lock the file. Raises BusyError if another process holds it for more than `wait_s`."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(file, flags, 0o600)
    until_s = time.monotonic() + wait_s
    try:
        with suppress(OSError):  # a file system without locks
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > until_s:
                        raise BusyError(f"{file.parent}: another process is at it") from None
                    time.sleep(_POLL_S)
        yield
    finally:
        os.close(descriptor)


# ---- episode rows --------------------------------------------------------------------------------
# Makes a data page's rows from episodes and held-out records; drops values of a wrong type.


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
