"""Reads a run folder, even an incomplete or damaged one."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rl.config.loading import find_config
from rl.config.schema import load_config
from rl.files import read_object, read_rows
from rl.record.checkpoint import format_problem
from rl.record.run_summary import not_a_run

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
