"""The data pages of a report: one an iteration, some for finding, some for each evaluation.

<run>/report/data/it_000012.js      the groups of iteration 12; `it_000012_2.js`: what did not
                                    fit, from a group on
<run>/report/data/find_000000.js    what groups are found by, of `CHUNK` iterations
<run>/report/data/eval_000020.js    held-out samples after 20 iterations; `_2` as above
<run>/report/data/other_eval_...    those of the run that is compared with
<run>/report/data/made_of.json      the sources of each: what did not change is not made again
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, TypeGuard

from rl.files.atomic import read_rows, write_atomically
from rl.report.disagreement import num_readings
from rl.report.reading import (
    Record,
    episode_files,
    evaluation_folders,
    named_rows,
    picture,
    read_config,
)
from rl.report.rows import (
    LEVELS,
    WHOLE,
    Limits,
    finding_row,
    group_row,
    groups_of,
    part_names,
    record_row,
)
from rl.report.script import call, literal, value_of
from rl.report.tokens import Pieces

FORMAT = 2
"""Of the pages: another one makes all of them again."""
MAX_PAGE_BYTES = 300_000
CHUNK = 50
_OURS = re.compile(r"(?:it|find|(?:other_)?eval)_\d{6,}(?:_\d+)?\.js")


@dataclass
class Made:
    """What lies there now."""

    iterations: list[tuple[int, int]] = field(default_factory=list)
    """(iteration, how many groups), of those that have a page."""
    evaluations: list[tuple[int, int]] = field(default_factory=list)
    """(iterations done, how many pages)."""
    other_evaluations: list[tuple[int, int]] = field(default_factory=list)
    damaged: dict[str, int] = field(default_factory=dict)
    """File -> how many of its lines cannot be read."""
    num_written: int = 0
    """Pages that were made now."""

    @property
    def chunks(self) -> list[int]:
        return sorted({iteration // CHUNK for iteration, _ in self.iterations})


class _Folder:
    """Makes pages whose sources changed, and remembers of what."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self.num_written = 0
        self.kept: set[str] = set()
        self.made: dict[str, dict[str, Any]] = {}
        self._before: dict[str, Any] = {}
        try:
            before = json.loads((folder / "made_of.json").read_bytes())
            if before["format"] == FORMAT and isinstance(before["pages"], dict):
                self._before = before["pages"]
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            pass

    def page(self, name: str, stamp: Sequence[Any], make: Callable[[], dict[str, Any]]) -> bool:
        """Whether `name` had to be made: `make` writes its files and returns what to remember of
        it, among it 'files'."""
        old = self._before.get(name)
        if (
            _is_whole(old, name)
            and old["stamp"] == list(stamp)
            and old["left"] == self._left(name, old["files"])
            and all((self.path / file).is_file() for file in old["files"])
        ):
            self.made[name] = old
            self.kept.update(old["files"])
            return False
        made = make()
        left = self._left(name, made["files"])
        self.made[name] = made | {"stamp": list(stamp), "left": left}
        self.kept.update(made["files"])
        return True

    def _left(self, name: str, files: Sequence[str]) -> list[list[Any]]:
        """What tells whether pages of that name are as they were left."""
        return _stamp([self.path / file for file in files if file.startswith(name)])

    def forget(self, name: str) -> None:
        """Have it made again."""
        self._before.pop(name, None)

    def write(self, file: str, content: str) -> str:
        write_atomically(self.path / file, content)
        self.num_written += 1
        self.kept.add(file)
        return file

    def remember(self, pages: Mapping[str, Any]) -> None:
        whole = json.dumps({"format": FORMAT, "pages": pages})
        write_atomically(self.path / "made_of.json", whole)

    def note(self) -> None:
        """What is made so far is not made again, should this be the end."""
        self.remember({**self._before, **self.made})

    def close(self) -> None:
        """Remember, and remove the pages of what is no more."""
        self.remember(self.made)
        for path in self.path.iterdir():
            if _OURS.fullmatch(path.name) and path.name not in self.kept:
                path.unlink()


def _is_whole(old: Any, name: str) -> TypeGuard[dict[str, Any]]:
    """Whether that is what `page` remembers; the file may come with a stranger's run."""
    return (
        isinstance(old, dict)
        and {"stamp", "left"} <= old.keys()
        and isinstance(files := old.get("files"), list)
        and all(isinstance(file, str) and _OURS.fullmatch(file) for file in files)
        and f"{name}.js" in files
        and type(old.get("damaged")) is int
        and (not name.startswith("it_") or type(old.get("groups")) is int)
    )


def refresh(run_dir: Path, folder: Path, other: Path | None = None) -> Made:
    """Make the pages in `folder` what `run_dir` holds now. `other`: a run to compare with."""
    pages, made = _Folder(folder), Made()
    config = read_config(run_dir)
    pieces = Pieces(config)
    readings = num_readings(config)
    for chunk, in_chunk in groupby(episode_files(run_dir).items(), lambda it: it[0] // CHUNK):
        found_by: dict[str, Any] = {}
        found_before = _found_before(folder / f"{_found_in(chunk)}.js")
        there = []
        for iteration, files in in_chunk:
            there.append(iteration)
            name = f"it_{iteration:06d}"
            if str(iteration) not in found_before:
                pages.forget(name)
            make = partial(_iteration, pages, found_by, iteration, files, run_dir, pieces, readings)
            pages.page(name, _stamp([*files, run_dir / "images" / name]), make)
            made.iterations.append((iteration, pages.made[name]["groups"]))
            _note_damage(made, f"episodes/{name}", pages.made[name])
        _chunk(pages, chunk, found_before, found_by, there)
        if found_by:
            pages.note()
    made.evaluations = _evaluations(pages, made, run_dir, pieces, "")
    if other is not None:
        made.other_evaluations = _evaluations(pages, made, other, pieces, "other_")
    pages.close()
    made.num_written = pages.num_written
    return made


def _stamp(paths: Sequence[Path]) -> list[list[Any]]:
    """What tells whether files changed or were copied (nobody sets a ctime); those that are not
    there are left out."""
    stats = [(str(path), path.stat()) for path in paths if path.exists()]
    return [
        [name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
        for name, stat in stats
    ]


def _note_damage(made: Made, file: str, remembered: Mapping[str, Any]) -> None:
    if remembered.get("damaged"):
        made.damaged[file] = remembered["damaged"]


def _iteration(
    pages: _Folder,
    found_by: dict[str, Any],
    iteration: int,
    files: Sequence[Path],
    run_dir: Path,
    pieces: Pieces,
    readings: Mapping[str, int],
) -> dict[str, Any]:
    """Writes its pages; returns what to remember, and adds to `found_by` what its groups are."""
    read = [read_rows(path) for path in files]
    rows: list[Record] = [row for rows_here, _ in read for row in rows_here]
    names, groups = part_names(rows), groups_of(rows)

    def encoded(limits: Limits) -> list[str]:
        return [literal(group_row(group, names, run_dir, pieces, limits)) for group in groups]

    head = {"it": iteration, "parts": names}
    written = _write(pages, f"it_{iteration:06d}", head, encoded)
    found = [finding_row(g, group, names, readings) for g, group in enumerate(groups)]
    damaged = sum(len(numbers) for _, numbers in read)
    found_by[str(iteration)] = {"parts": names, "rows": found}
    # With the page that it is found by goes what stands in it.
    files_of_it = [*written, f"{_found_in(iteration // CHUNK)}.js"]
    return {"files": files_of_it, "groups": len(groups), "damaged": damaged}


def _found_in(chunk: int) -> str:
    return f"find_{chunk:06d}"


def _write(
    pages: _Folder, name: str, head: Mapping[str, Any], encoded: Callable[[Limits], list[str]]
) -> list[str]:
    """The rows under the first limits that let them stand in one page; under the last they may
    take several. Returns the files."""
    rows: list[str] = []
    limits = WHOLE
    for limits in LEVELS:
        rows = encoded(limits)
        if sum(len(row.encode()) + 1 for row in rows) < MAX_PAGE_BYTES - 2000:
            break
    pages_rows: list[list[str]] = [[]]
    size = 0
    for row in rows:
        length = len(row.encode()) + 1
        if size + length > MAX_PAGE_BYTES - 2000 and pages_rows[-1]:
            pages_rows.append([])
            size = 0
        pages_rows[-1].append(row)
        size += length
    starts = [sum(map(len, pages_rows[:number])) for number in range(len(pages_rows))]
    cut = None if limits is WHOLE else [limits.text_chars, limits.reply_chars, limits.num_tokens]
    files = []
    for number, page_rows in enumerate(pages_rows, 1):
        page = name if number == 1 else f"{name}_{number}"
        # The rows are spelt already.
        content = call(page, {**head, "starts": starts, "cut": cut, "rows": []})
        content = content.replace('"rows":[]});', f'"rows":[{",".join(page_rows)}]}});')
        files.append(pages.write(f"{page}.js", content))
    return files


def _found_before(path: Path) -> dict[str, Any]:
    """What a page to find groups by holds; {} where it cannot be read."""
    try:
        found = value_of(path.read_bytes().decode())
        literal(found)
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _chunk(
    pages: _Folder,
    chunk: int,
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    there: Sequence[int],
) -> None:
    """What the groups of some iterations are found by: the new ones beside those of before."""
    name = _found_in(chunk)
    merged = {str(it): new.get(str(it), old.get(str(it))) for it in there}
    content = call(name, merged)
    path = pages.path / f"{name}.js"
    pages.kept.add(path.name)
    if not path.is_file() or path.read_bytes() != content.encode():
        pages.write(path.name, content)


def _evaluations(
    pages: _Folder, made: Made, run_dir: Path, pieces: Pieces, prefix: str
) -> list[tuple[int, int]]:
    stock_file = run_dir / "stock" / "rewards.jsonl"
    pictures = _stock_pictures(stock_file)
    found = []
    for iteration, folder in evaluation_folders(run_dir).items():
        name = f"{prefix}eval_{iteration:06d}"

        def make(
            name: str = name, iteration: int = iteration, folder: Path = folder
        ) -> dict[str, Any]:
            rows, damaged = named_rows(folder / "records.jsonl", "id")
            names = part_names(rows)

            def encoded(limits: Limits) -> list[str]:
                return [
                    literal(record_row(row, names, folder, stock, pieces, limits))
                    for row in rows
                    for stock in [pictures.get(str(row["id"]))]
                ]

            written = _write(pages, name, {"it": iteration, "parts": names}, encoded)
            return {"files": written, "damaged": len(damaged)}

        pages.page(name, _stamp([folder / "records.jsonl", stock_file]), make)
        found.append((iteration, len(pages.made[name]["files"])))
        _note_damage(made, f"{run_dir.name}/evaluation/{folder.name}", pages.made[name])
    return found


def _stock_pictures(path: Path) -> dict[str, str | None]:
    """Sample id -> what the untrained system drew of it."""
    rows = read_rows(path)[0] if path.is_file() else []
    files = {str(row.get("id")): row.get("files") for row in rows}
    return {
        identity: picture(path.parent, drawn.get("stock"))
        for identity, drawn in files.items()
        if isinstance(drawn, Mapping)
    }
