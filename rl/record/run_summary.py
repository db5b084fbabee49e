"""What lies in a folder of runs: how far each is, how good, how large, and whether it is in use.

What: `look`, at one folder, which changes nothing and raises nothing: a folder that is damaged, of
a newer version, or no run's says so in `problem`. What not: what may go (`prune.py`), how it is
shown (`commands/runs.py`).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl.config import formats
from rl.files.atomic import read_rows, row_of
from rl.record.checkpoint import Found, find, iteration_of, steps_of, too_new
from rl.record.run_lock import LOCKS, Use, use_of
from rl.record.untrusted import shown

NO_RUN = "no run"
_MAX_SHOWN = 200
_MAX = 10**9
_PICTURES = ("images", "evaluation", "stock", "report")
"""Folders whose .png count as pictures."""


@dataclass(frozen=True)
class Summary:
    """One folder. Sizes are sums of its files' bytes; links are not followed."""

    path: Path
    problem: str = ""
    """Why it is not known what lies there, or ''."""
    system: str = ""
    """What draws, or who writes where nothing is drawn, by the plug's name."""
    done: int = 0
    """Iterations that have a line of metrics."""
    planned: str = ""
    """'40', '2 epochs'."""
    held_out: float | None = None
    """The last reward on held-out data."""
    best: float | None = None
    """The highest."""
    bytes_of: Mapping[str, int] = field(default_factory=dict)
    """'checkpoints', 'pictures', 'rest'."""
    written_s: float = 0.0
    """When a file in it was last written, s since 1970."""
    use: Use = "unknown"
    checkpoint: int | None = None
    """Iterations in the newest checkpoint that is whole, by its files' sizes."""
    damaged: Sequence[int] = ()
    """Of newer checkpoints that are not."""

    @property
    def num_bytes(self) -> int:
        return sum(self.bytes_of.values())


def look(path: Path) -> Summary:
    """At the folder of one run, or what may be one."""
    try:
        return _look(path)
    except OSError as error:
        why = error.strerror or str(error)
        return Summary(path, f"cannot be read ({shown(why, _MAX_SHOWN)})")
    except ValueError as error:
        return Summary(path, shown(str(error), _MAX_SHOWN))


def folders(parent: Path) -> list[Path]:
    """Those that may be runs: `parent` itself where it is one."""
    if _is_begun(parent):
        return [parent]
    return sorted(entry for entry in parent.iterdir() if entry.is_dir())


def _is_begun(path: Path) -> bool:
    return any((path / name).is_file() for name in ("config.json", *LOCKS))


def _look(path: Path) -> Summary:
    if not _is_begun(path):
        return Summary(path, NO_RUN)
    bytes_of, written_s = _sizes(path)
    use = use_of(path)
    known = Summary(path, bytes_of=bytes_of, written_s=written_s, use=use)
    if problem := too_new(path):
        return _with(known, problem=shown(problem, _MAX_SHOWN))
    config = _config(path)
    if config is None:
        is_there = (path / "config.json").is_file()
        why = "its config.json is damaged" if is_there else "it has no config.json"
        early = ": it is being loaded, or never was" if not is_there else ""
        return _with(known, problem=why + early)
    found = find(path, hashes=False)
    rows = _rows(path / "metrics.jsonl")
    rewards = [row["eval/reward"] for row in rows if _is_number(row.get("eval/reward"))]
    return _with(
        known,
        system=_system(config),
        done=max((row["iteration"] for row in rows), default=0),
        planned=_planned(config),
        held_out=rewards[-1] if rewards else None,
        best=max(rewards, default=None),
        checkpoint=None if found.path is None else iteration_of(found.path),
        damaged=_damaged(path, found),
    )


def _with(known: Summary, **more: Any) -> Summary:
    return Summary(**{**vars(known), **more})


def _config(path: Path) -> dict[str, Any] | None:
    """None for none, or one that is damaged."""
    file = path / "config.json"
    row = row_of(file.read_bytes()) if file.is_file() else None
    if row is None or not isinstance(row.get("policy"), dict) or "run_name" not in row:
        return None
    return formats.stored(row, str(file))


def _system(config: Mapping[str, Any]) -> str:
    for room in ("renderer", "policy"):
        section = config.get(room)
        name = section.get("type") if isinstance(section, dict) else None
        if isinstance(name, str) and name != "none":
            return name.rpartition(".")[2]
    return "?"


def _planned(config: Mapping[str, Any]) -> str:
    if _is_number(config.get("num_iterations")):
        return f"{config['num_iterations']:.0f}"
    return f"{config['num_epochs']:g} epochs" if _is_number(config.get("num_epochs")) else "?"


def _rows(file: Path) -> list[dict[str, Any]]:
    rows = read_rows(file)[0] if file.is_file() else []
    return [row for row in rows if type(it := row.get("iteration")) is int and 0 <= it <= _MAX]


def _is_number(value: object) -> bool:
    """One that a line has room for."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _MAX


def _damaged(path: Path, found: Found) -> list[int]:
    newest = -1 if found.path is None else iteration_of(found.path)
    return [number for number in map(iteration_of, steps_of(path)) if number > newest]


def _sizes(path: Path) -> tuple[dict[str, int], float]:
    """(bytes by kind, when the last file was written)."""
    bytes_of = {"checkpoints": 0, "pictures": 0, "rest": 0}
    written_s = path.stat().st_mtime
    newest_s = 0.0
    for file, known in files_in(path):
        top = file.relative_to(path).parts[0]
        is_picture = top in _PICTURES and file.suffix == ".png"
        kind = "checkpoints" if top == "checkpoints" else "pictures" if is_picture else "rest"
        bytes_of[kind] += known.st_size
        # To look at a run, or to report on it, is not to go on with it.
        if top != "report" and str(file.relative_to(path)) not in LOCKS:
            newest_s = max(newest_s, known.st_mtime)
    return bytes_of, newest_s or written_s


def files_in(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Every file below a folder; what vanishes meanwhile is left out, and links are."""
    for folder, _, names in os.walk(path):
        for name in names:
            file = Path(folder) / name
            try:
                known = file.lstat()
            except FileNotFoundError:
                continue
            if stat.S_ISREG(known.st_mode):
                yield file, known
