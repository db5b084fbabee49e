"""Reads a run folder: iterations, curves, episodes as rows of the page."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby, zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any

from filelock import FileLock, Timeout

from rl.config.loading import find_config, located
from rl.config.schema import load_config
from rl.files import private_folder, read_object, read_rows
from rl.printing import without_lone_surrogates
from rl.record.checkpoint import format_problem
from rl.record.publish import at
from rl.record.run_record import entries
from rl.record.run_summary import not_a_run
from rl.run.metric_table import doc_of

# ---- reading -------------------------------------------------------------------------------------
# Reads a run folder, even an incomplete or damaged one.

Record = Mapping[str, Any]
CONFIG_ENDINGS = (".jsonnet", ".libsonnet", ".json")
_MAX_ITERATION = 10**9
_MAX_NUMBER = 1e100
MAX_SOURCES = 32
"""Maximum number of source pictures on the page per sample, besides the first; no policy reads that
many."""
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
    there is no readable run; its message names the run with the most similar name."""
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
    if not read_config(run_dir):
        print(f"{run_dir}/config.json is gone or damaged: settings are left out", file=sys.stderr)
    return run_dir


def named_rows(path: Path, key: str) -> tuple[list[dict[str, Any]], list[int]]:
    """The rows of a JSONL file that have `key`, with key 'iteration' only those where it is a whole
    number from 0 to 10^9; and the numbers (from 1) of its damaged lines, such as a last line cut
    short when the process was killed."""
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
    folders = entries(run_dir / "evaluation").items()
    return {it: folder for folder, it in folders if (folder / "records.jsonl").exists()}


def read_evaluations(run_dir: Path) -> list[Evaluation]:
    """The first and the last evaluation, or fewer if there are fewer. Damaged lines are left out;
    the page's alarms count them."""
    folders = list(evaluation_folders(run_dir).items())
    return [
        Evaluation(
            iteration,
            folder,
            {str(row["id"]): row for row in named_rows(folder / "records.jsonl", "id")[0]},
        )
        # [1:][-1:]: the last one, unless it is the first.
        for iteration, folder in [*folders[:1], *folders[1:][-1:]]
    ]


def episode_files(run_dir: Path) -> dict[int, list[Path]]:
    """Iteration -> its episode files, one per rank; iterations and ranks are in order."""
    files_of: dict[int, list[Path]] = {}
    for file, iteration in entries(run_dir / "episodes").items():
        files_of.setdefault(iteration, []).append(file)
    return files_of


def read_config(run_dir: Path) -> dict[str, Any]:
    """`config.json` of a run; {} if there is none, or no object in it."""
    try:
        return read_object(run_dir / "config.json") or {}
    except FileNotFoundError:
        return {}


def picture(folder: Path, file: object, may_be_link: bool = False) -> str | None:
    """`file` if it is an existing picture below `folder`, reached without symlinks (`may_be_link`:
    `folder` itself may be one); else None."""
    if not isinstance(file, str) or not _PICTURE.fullmatch(file):
        return None
    if folder.is_symlink() and not may_be_link:
        return None
    path = folder / file
    is_in_place = os.path.realpath(path) == os.path.join(os.path.realpath(folder), file)
    return file if is_in_place and path.is_file() else None


def picture_of(run_dir: Path, place: object) -> str | None:
    """`place` if it is a picture below a run folder (`images/a.png`) or a part of one
    (`images/a.webp#xywh=0,0,64,64`); the top folder may be a link. Else None."""
    if not isinstance(place, str):
        return None
    file, mark, box = place.partition("#")
    if not _PICTURE.fullmatch(file) or (mark and not _BOX.fullmatch(box)):
        return None
    top, _, path_below = file.partition("/")
    return place if path_below and picture(run_dir / top, path_below, may_be_link=True) else None


def source_places(record: Record) -> list[tuple[object, object]]:
    """(file, thumbnail) of each source picture that an episode's record names, unchecked."""
    files = [record.get("source_file"), *_at_most(record.get("other_source_files"))]
    return list(zip_longest(files, _at_most(record.get("source_thumbnails"))))


def shown_of(record: Record) -> list[str]:
    """Hashes of a held-out sample's pictures; [] in an older run's record."""
    return [digest for digest in _at_most(record.get("shown")) if isinstance(digest, str)]


def _at_most(values: object) -> list[Any]:
    """The first `MAX_SOURCES` of a list; [] for anything else."""
    return values[:MAX_SOURCES] if isinstance(values, list) else []


def is_control(config: Mapping[str, Any]) -> bool:
    """Whether a run's config shuffles its rewards."""
    return bool(at(config, "algorithm.shuffle_rewards"))


def parts_of(record: Record) -> Mapping[str, Any]:
    """The numbers behind a reward, by name."""
    parts = record.get("parts")
    return parts if isinstance(parts, Mapping) else {}


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
CURVES: list[dict[str, Any]] = json.loads(
    Path(__file__).with_name("page").joinpath("curves.json").read_text("utf-8")
)
"""The charts in order. A line is [metric, label, style]; `top`: upper end of the y axis, None = the
largest value; `main`: shown without unfolding."""


def values_of(metrics: Iterable[Record], name: str) -> list[float]:
    """The metric's values, of each row in which it is a number."""
    return [value for row in metrics if (value := number(row.get(name))) is not None]


def curve_data(metrics: Sequence[Record], num_pictures: int | None) -> dict[str, Any]:
    """All metrics of a run as columns, for the page's charts (`page/charts.js`), in at most
    `MAX_POINTS` rows; a longer run's are averaged over equal spans, except the first and the last.
    Before a name, `<text>:` may say whose metric it is.
    `num_pictures`: pictures per iteration, if known.

    `it`: iterations; `hours`: summed time of the iterations; `pictures`: pictures drawn, None if
    unknown; `of`: metric -> value or None per row; `span`: iterations that a row averages; `docs`:
    metric -> (unit, meaning).
    """
    span = max(1, math.ceil((len(metrics) - 2) / (MAX_POINTS - 2)))
    middle = [metrics[i : i + span] for i in range(1, len(metrics) - 1, span)]
    # [1:][-1:]: the last row, unless it is the first.
    spans = [each for each in (metrics[:1], *middle, metrics[1:][-1:]) if each]
    iterations = [six_digits(fmean(float(row["iteration"]) for row in each)) for each in spans]
    seconds = [sum(number(row.get("time/iteration_s")) or 0.0 for row in each) for each in spans]
    names = sorted({name for row in metrics for name in row} - {"iteration"})
    columns = {name: [mean(each, name) for each in spans] for name in names}
    documented = ((name, doc_of(name.rpartition(":")[2])) for name in names)
    return {
        "it": iterations,
        "hours": [six_digits(total / 3600) for total in accumulate(seconds)],
        "pictures": num_pictures and [it * num_pictures for it in iterations],
        "of": {name: column for name, column in columns.items() if set(column) != {None}},
        "span": span,
        "docs": {name: [doc.unit, doc.meaning] for name, doc in documented if doc},
    }


def mean(rows: Sequence[Record], name: str) -> float | None:
    """Mean of a metric in the rows that have it, to six digits; None if no row has it."""
    values = values_of(rows, name)
    return six_digits(fmean(values)) if values else None


def six_digits(value: float) -> float:
    """Six significant digits; whole numbers as such, which take fewer characters."""
    value = float(f"{value:.6g}")
    return int(value) if value.is_integer() and abs(value) < 1e15 else value


# ---- folder --------------------------------------------------------------------------------------


class BusyError(ValueError):
    """Another process writes the same page, or follows the same run."""


def own_folder(folder: Path) -> Path:
    """`folder`, made if it does not exist. Raises ValueError if it or anything in it is a link."""
    for path in (folder, *folder.glob("*"), *folder.glob("data/*")):
        if path.is_symlink():
            raise ValueError(f"{path} is a link, which might lead out of the run folder; remove it")
    private_folder(folder)
    return folder


@contextmanager
def locked(file: Path, wait_s: float) -> Iterator[None]:
    """Lock the file. Raises BusyError if another process holds it for more than `wait_s`, OSError
    if it is a link."""
    lock = FileLock(file, wait_s, mode=0o600, fallback_to_soft=False)
    with ExitStack() as stack:
        try:
            stack.enter_context(lock)
        except Timeout:
            raise BusyError(
                f"{file.parent}: another process writes this page or follows this run; wait for "
                "it, or end it"
            ) from None
        except OSError:
            if file.is_symlink():
                raise
            # Else it is a file system without locks.
        yield


# ---- episode rows --------------------------------------------------------------------------------
# Makes a data page's rows from episodes and held-out records; drops values of a wrong type.


MAX_TEXT_CHARS, MAX_REPLY_CHARS, MAX_TOKENS = 4000, 2000, 1024
"""What the page shows of a text, of a judge's reply and of a completion's tokens."""


class Pieces(dict[int, str]):
    """Token id -> its text, by the tokenizer of a run's policy if that is on this machine, else
    the id as text. Makes no network requests."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """`config`: the content of the run's `config.json`."""
        super().__init__()
        self._tokenizer = _tokenizer(config)

    @property
    def are_known(self) -> bool:
        """Whether the tokenizer is on this machine."""
        return self._tokenizer is not None

    def __missing__(self, token: int) -> str:
        try:
            piece = str(self._tokenizer.decode([token], skip_special_tokens=False))
        # No tokenizer, or an id outside the vocabulary.
        except (AttributeError, OverflowError, TypeError, ValueError):
            piece = f"{token} "
        return self.setdefault(token, piece)


def _tokenizer(config: Mapping[str, Any]) -> Any:
    path = at(config, "policy.model_path")
    if not isinstance(path, str):
        return None
    try:
        from huggingface_hub import try_to_load_from_cache
        from tokenizers import Tokenizer

        file: Any = Path(located(path)) / "tokenizer.json"
        if not file.is_file():
            file = try_to_load_from_cache(path, "tokenizer.json")  # no path if it is not there
        return Tokenizer.from_file(str(file)) if isinstance(file, str | Path) else None
    # tokenizers raises bare Exceptions for an unreadable file; ImportError: it is not installed.
    except Exception:
        return None


def text(value: object, max_chars: int) -> str:
    """`value`, cut at `max_chars`; '' if it is not a string."""
    if not isinstance(value, str):
        return ""
    # One character more: the cut shall not split a pair of surrogates.
    kept = without_lone_surrogates(value[: max_chars + 1])
    return kept if len(value) <= max_chars else kept[:max_chars] + " [...]"


def rounded(value: object, digits: int = 4) -> float | None:
    """`value` with `digits` decimals; None if it is no number, or above 1e12."""
    num = number(value)
    return None if num is None or abs(num) > 1e12 else round(num, digits)


def groups_of(rows: Iterable[Record]) -> list[list[Record]]:
    """Splits rows into groups; the rows of one group must be adjacent."""
    by_group = groupby(rows, lambda row: (row.get("rank"), row.get("group_id")))
    return [list(rows_G) for _, rows_G in by_group]


def part_names(rows: Iterable[Record]) -> list[str]:
    """The names of the reward's parts, in the order of their first occurrence."""
    return list(dict.fromkeys(str(name) for row in rows for name in parts_of(row)))


def _parts(row: Record, names: Sequence[str]) -> list[float | None]:
    return [rounded(parts_of(row).get(name)) for name in names]


def group_row(
    rows_G: Sequence[Record], names: Sequence[str], run_dir: Path, pieces: Pieces
) -> dict[str, Any]:
    """A group with all its completions, for the page's group view."""
    first = rows_G[0]
    bare = first.get("bare")
    file_of = partial(picture_of, run_dir)
    bare_row = _member(bare, names, file_of, pieces) if isinstance(bare, Mapping) else None
    return {
        "id": text(first.get("sample_id"), 300),
        "cat": text(first.get("category"), 200),
        "say": text(first.get("instruction"), MAX_TEXT_CHARS),
        **_sources(first, file_of),
        "goal": file_of(first.get("target_file")) or file_of(first.get("target_thumbnail")),
        "rank": first.get("rank") if type(first.get("rank")) is int else 0,
        "of": [_member(row, names, file_of, pieces) for row in rows_G],
        "bare": bare_row,
    }


def _sources(row: Record, file_of: Callable[[object], str | None]) -> dict[str, Any]:
    """`src`: the first source picture; `others`: further ones, if any; null for a missing file."""
    src, *others = [file_of(file) or file_of(small) for file, small in source_places(row)]
    return {"src": src} | ({"others": others} if others else {})


def _member(
    row: Record, names: Sequence[str], file_of: Callable[[object], str | None], pieces: Pieces
) -> dict[str, Any]:
    """One completion of training or evaluation. `file_of`: a picture's path, or None.

    `end`: finish; `st`: status; `why`: failure; `r`: reward; `adv`: advantage; `s`: judge seconds;
    `said`: replies.
    """
    replies = row.get("replies")
    replies = replies if isinstance(replies, Mapping) else {}
    member: dict[str, Any] = {
        "text": text(words_of(row), MAX_TEXT_CHARS),
        "think": text(row.get("thought"), MAX_TEXT_CHARS),
        "end": text(row.get("finish"), 40),
        "st": text(row.get("status"), 40),
        "why": text(row.get("failure"), MAX_TEXT_CHARS),
        "r": rounded(row.get("reward")),
        "adv": rounded(row.get("advantage"), 3),
        "seed": row.get("noise_seed") if isinstance(row.get("noise_seed"), int) else None,
        "s": rounded(row.get("judge_s"), 3),
        "parts": _parts(row, names),
        "img": file_of(row.get("image_file")) or file_of(row.get("thumbnail")),
        "said": {
            text(name, 100): [text(reply, MAX_REPLY_CHARS) for reply in texts]
            for name, texts in replies.items()
            if isinstance(texts, Sequence) and not isinstance(texts, str)
        },
    }
    regions = _regions(row.get("regions"))
    return member | ({"regions": regions} if regions else {}) | _tokens(row, pieces)


def _regions(by_reward: object) -> list[list[Any]]:
    """[label, left, top, right, bottom] of each region, in shares of the picture's sides."""
    named = by_reward.values() if isinstance(by_reward, Mapping) else ()
    rows = []
    for region in (each for regions in named if isinstance(regions, list) for each in regions):
        match region:
            case {"label": str(label), "box": [_, _, _, _] as corners}:
                box = [rounded(corner) for corner in corners]
                if all(corner is not None and 0 <= corner <= 1 for corner in box):
                    rows.append([text(label, 200), *box])
    return rows


def _tokens(row: Record, pieces: Pieces) -> dict[str, Any]:
    """`tok`: texts; `lp`: log-probs, nats; `ids`: whether `tok` are ids; `forced`: tokens that the
    grammar forced; `cut`: number of tokens left out."""
    ids, logprobs, forced = (row.get(name) for name in ("token_ids", "sampler_logprobs", "forced"))
    if (
        not isinstance(ids, list)
        or not isinstance(logprobs, list)
        or not all(type(token) is int for token in ids)
    ):
        return {}
    return {
        "tok": [pieces[token] for token in ids[:MAX_TOKENS]],
        "lp": [rounded(value, 2) for value in logprobs[: min(len(ids), MAX_TOKENS)]],
        "ids": not pieces.are_known,
        "forced": [bool(flag) for flag in forced[:MAX_TOKENS]] if isinstance(forced, list) else [],
        "cut": len(ids[MAX_TOKENS:]),
    }


def finding_row(rows_G: Sequence[Record], names: Sequence[str], run_dir: Path) -> dict[str, Any]:
    """The values by which groups are filtered: category, instruction, rewards of the graded
    episodes, statuses of all, means of the parts, and at most three distinct pictures (the source,
    the completion with the largest reward, and that with the smallest), thumbnails where there are
    any."""
    first = rows_G[0]
    graded = [row for row in rows_G if rounded(row.get("reward")) is not None]
    graded.sort(key=lambda row: float(row["reward"]))
    columns = zip(*(_parts(row, names) for row in rows_G), strict=True)
    values = [[value for value in column if value is not None] for column in columns]
    source, small = source_places(first)[0]
    places = [small or source]
    for row in (graded or rows_G)[-1], (graded or rows_G)[0]:
        places.append(row.get("thumbnail") or row.get("image_file"))
    pictures = [picture_of(run_dir, place) for place in places]
    return {
        "cat": text(first.get("category"), 60),
        "say": text(first.get("instruction"), 160),
        "rewards": [rounded(row["reward"]) for row in graded],
        "st": [text(row.get("status"), 40) for row in rows_G],
        "parts": [round(fmean(column), 4) if column else None for column in values],
        "pictures": list(dict.fromkeys(filter(None, pictures))),
    }


def histogram(values: Iterable[float | None], step: float, first: float, num: int) -> list[int]:
    """Counts of the values by bin; bin i is centred at `first` + i `step`, the outermost bins also
    count what lies beyond them."""
    counts = [0] * num
    for value in values:
        if value is not None:
            counts[min(num - 1, max(0, round((value - first) / step)))] += 1
    return counts


def record_row(
    record: Record, names: Sequence[str], folder: Path, stock: str | None, pieces: Pieces
) -> dict[str, Any]:
    """A held-out sample. `stock`: the file of the stock variant's picture, in `<run>/stock`."""
    file_of = partial(picture, folder)
    return {
        **_member(record, names, file_of, pieces),
        "id": text(str(record["id"]), 300),
        "cat": text(record.get("category"), 200),
        "say": text(record.get("instruction"), MAX_TEXT_CHARS),
        "ref": text(record.get("reference"), MAX_TEXT_CHARS),
        "bare": rounded(record.get("bare_reward")),
        "stock": rounded(record.get("stock_reward")),
        **_sources(record, file_of),
        "bimg": file_of(record.get("bare_file")),
        "simg": stock,
    }
