"""Writes those data pages of a report, `<run>/report/data/*.js`, whose sources have changed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, StringConstraints

from rl.config.loading import read_bytes
from rl.files import read_rows, write_atomically
from rl.report.episode_rows import (
    LEVELS,
    WHOLE,
    Limits,
    Pieces,
    finding_row,
    group_row,
    groups_of,
    histogram,
    part_names,
    record_row,
    short,
)
from rl.report.reading import (
    Record,
    episode_files,
    evaluation_folders,
    named_rows,
    picture,
    read_config,
)

MAX_PAGE_BYTES = 300_000
CHUNK = 20
"""Number of iterations whose pages are rewritten together."""
NUM_REWARD_BINS, NUM_ADVANTAGE_BINS = 21, 25
"""Bins of the histograms: rewards 0 to 1 in steps of 0.05, advantages -3 to 3 in steps of 0.25."""
_CALL = re.compile(r'page\.data\("[a-z0-9_]+",(.*)\);\n', re.DOTALL)
"""What `call` writes. A page opened from disk can load classic scripts, not modules or `fetch`."""
_SPECIAL = re.compile("[<>&\u2028\u2029\x7f\ud800-\udfff]")
_PAGE_FILE = re.compile(r"(?:it|find|eval)_\d{6,}(?:_\d+)?\.js")


@dataclass
class PageIndex:
    """The pages in the folder."""

    iterations: list[tuple[int, int]] = field(default_factory=list)
    """(iteration, number of groups) of each iteration that has a page."""
    evaluations: list[tuple[int, int]] = field(default_factory=list)
    """(iterations done, number of pages) of each evaluation."""
    histograms: list[tuple[int, list[int], list[int]]] = field(default_factory=list)
    """(iteration, counts of its rewards by bin, counts of its advantages by bin)."""
    damaged: dict[str, int] = field(default_factory=dict)
    """File -> number of unreadable lines."""
    num_written: int = 0
    """Number of pages that `refresh` wrote."""


class _Part(BaseModel):
    """Pages that are written together."""

    stamp: list[Any]
    """Path, size, times and inode of each source file."""
    files: list[Annotated[str, StringConstraints(pattern=f"^(?:{_PAGE_FILE.pattern})$")]]
    groups: list[tuple[int, int]]
    """(iteration, number of groups)."""
    histograms: list[tuple[int, list[int], list[int]]]
    damaged: dict[str, int]
    """File -> number of unreadable lines."""


class _Manifest(BaseModel):
    """`made_of.json`; untrusted, because it may come with another user's run."""

    format: Literal[5] = 5
    parts: dict[str, _Part] = {}


class _Folder:
    """The data folder; writes the parts whose sources have changed."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self.num_written = self._num_made = 0
        self._current = _Manifest()
        try:
            self._previous = _Manifest.model_validate_json(read_bytes(folder / "made_of.json"))
        except (OSError, ValueError):
            self._previous = _Manifest()

    def part(self, name: str, sources: Sequence[Path], make: Callable[[_Part], None]) -> _Part:
        """The part called `name`. Calls `make` to write its files if a source has changed or was
        copied (a copy has another ctime), or if one of its files is gone."""
        stats = [(path, path.stat()) for path in sources if path.exists()]
        stamp = [
            [str(path), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
            for path, stat in stats
        ]
        part = self._previous.parts.get(name)
        is_whole = part is not None and all((self.path / file).is_file() for file in part.files)
        if part is None or not is_whole or part.stamp != stamp:
            part = _Part(stamp=stamp, files=[], groups=[], histograms=[], damaged={})
            make(part)
            self._current.parts[name] = part
            self._num_made += 1
            # An interrupted refresh will continue here. After 1, 2, 4, 8, ... parts, because the
            # manifest names all of them.
            if self._num_made.bit_count() == 1:
                self._save_manifest(self._previous.parts | self._current.parts)
        self._current.parts[name] = part
        return part

    def write(self, part: _Part, page: str, content: str) -> None:
        write_atomically(self.path / f"{page}.js", content)
        part.files.append(f"{page}.js")
        self.num_written += 1

    def _save_manifest(self, parts: Mapping[str, _Part]) -> None:
        content = _Manifest(parts=dict(parts)).model_dump_json()
        write_atomically(self.path / "made_of.json", content)

    def close(self) -> None:
        """Remove pages whose sources are gone."""
        self._save_manifest(self._current.parts)
        kept = {file for part in self._current.parts.values() for file in part.files}
        for path in self.path.iterdir():
            if _PAGE_FILE.fullmatch(path.name) and path.name not in kept:
                path.unlink()


def refresh(run_dir: Path, folder: Path) -> PageIndex:
    """Update the pages in `folder` from `run_dir`."""
    pages, index = _Folder(folder), PageIndex()
    pieces = Pieces(read_config(run_dir))
    for chunk, in_chunk in groupby(episode_files(run_dir).items(), lambda it: it[0] // CHUNK):
        files_of = dict(in_chunk)
        sources = [path for files in files_of.values() for path in files]
        for kind in ("images", "thumbnails"):
            sources += [run_dir / kind / f"it_{iteration:06d}" for iteration in files_of]
        name = f"find_{chunk:06d}"
        make = partial(_write_chunk, pages, name, files_of, run_dir, pieces)
        part = pages.part(name, sources, make)
        index.iterations += part.groups
        index.histograms += part.histograms
        index.damaged |= part.damaged
    stock_file = run_dir / "stock" / "rewards.jsonl"
    stock = _stock_pictures(stock_file)
    for iteration, source in evaluation_folders(run_dir).items():
        name = f"eval_{iteration:06d}"
        make = partial(_write_evaluation, pages, name, iteration, source, stock, pieces)
        part = pages.part(name, [source / "records.jsonl", stock_file], make)
        index.evaluations.append((iteration, len(part.files)))
        index.damaged |= part.damaged
    pages.close()
    index.num_written = pages.num_written
    return index


def _write_chunk(
    pages: _Folder,
    name: str,
    files_of: Mapping[int, Sequence[Path]],
    run_dir: Path,
    pieces: Pieces,
    part: _Part,
) -> None:
    rows_of: dict[str, Any] = {}
    for iteration, files in files_of.items():
        rows_and_damage = [read_rows(path) for path in files]
        rows: list[Record] = [row for file_rows, _ in rows_and_damage for row in file_rows]
        names, groups = part_names(rows), groups_of(rows)
        page = f"it_{iteration:06d}"
        makers = [partial(group_row, group, names, run_dir, pieces) for group in groups]
        _write(pages, part, page, {"it": iteration, "parts": names}, makers)
        finding = [finding_row(g, group, names, run_dir) for g, group in enumerate(groups)]
        rows_of[str(iteration)] = {"parts": names, "rows": finding}
        part.groups.append((iteration, len(groups)))
        rewards = histogram([short(row.get("reward")) for row in rows], 0.05, 0, NUM_REWARD_BINS)
        advantages = [short(row.get("advantage")) for row in rows]
        counts = histogram(advantages, 0.25, -3, NUM_ADVANTAGE_BINS)
        part.histograms.append((iteration, rewards, counts))
        if damaged := sum(len(numbers) for _, numbers in rows_and_damage):
            part.damaged[f"episodes/{page}"] = damaged
    pages.write(part, name, call(name, rows_of))


def _write_evaluation(
    pages: _Folder,
    name: str,
    iteration: int,
    folder: Path,
    stock: Mapping[str, str | None],
    pieces: Pieces,
    part: _Part,
) -> None:
    rows, damaged = named_rows(folder / "records.jsonl", "id")
    names = part_names(rows)
    makers = [
        partial(record_row, row, names, folder, stock.get(str(row["id"])), pieces) for row in rows
    ]
    _write(pages, part, name, {"it": iteration, "parts": names}, makers)
    if damaged:
        part.damaged[f"evaluation/{folder.name}"] = len(damaged)


def _write(
    pages: _Folder,
    part: _Part,
    name: str,
    head: Mapping[str, Any],
    makers: Sequence[Callable[[Limits], Mapping[str, Any]]],
) -> None:
    """Write one row per maker, with the first limits of `LEVELS` under which all rows fit in one
    page; under the last limits they may take several pages."""
    max_bytes = MAX_PAGE_BYTES - 2000
    rows: list[str] = []
    limits = WHOLE
    for limits in LEVELS:
        rows = [literal(make(limits)) for make in makers]
        if sum(len(row.encode()) + 1 for row in rows) < max_bytes:
            break
    pages_rows: list[list[str]] = [[]]
    size = 0
    for row in rows:
        num_bytes = len(row.encode()) + 1
        if size + num_bytes > max_bytes and pages_rows[-1]:
            pages_rows.append([])
            size = 0
        pages_rows[-1].append(row)
        size += num_bytes
    starts = [sum(map(len, pages_rows[:number])) for number in range(len(pages_rows))]
    cut = None if limits is WHOLE else [limits.text_chars, limits.reply_chars, limits.num_tokens]
    for number, page_rows in enumerate(pages_rows, 1):
        page = name if number == 1 else f"{name}_{number}"
        # The rows are JavaScript already.
        content = call(page, {**head, "starts": starts, "cut": cut, "rows": []})
        content = content.replace('"rows":[]});', f'"rows":[{",".join(page_rows)}]}});')
        pages.write(part, page, content)


def _stock_pictures(path: Path) -> dict[str, str | None]:
    """Sample id -> file of the stock arm's picture."""
    rows = read_rows(path)[0]
    files = {str(row.get("id")): row.get("files") for row in rows}
    return {
        sample_id: picture(path.parent, arm_files.get("stock"))
        for sample_id, arm_files in files.items()
        if isinstance(arm_files, Mapping)
    }


def literal(value: Any) -> str:
    """`value` as JSON that is also JavaScript and cannot end the `<script>` around it, whatever
    text it holds."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return _SPECIAL.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def call(name: str, value: Any) -> str:
    """The script of the data page `name`, which passes its value to `rl/report/page/base.js`."""
    return f"page.data({literal(name)},{literal(value)});\n"


def value_of(script: str) -> Any:
    """The value in a data page. Raises ValueError if `script` is not exactly what `call` writes."""
    match = _CALL.fullmatch(script)
    if match is None:
        raise ValueError("no data page")
    return json.loads(match[1])
