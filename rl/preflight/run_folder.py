"""Whether a run's folder can be one, and be written to."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from rl.config.paths import FOLDER, GONE, not_a_file
from rl.record.run_lock import LOCKS
from rl.record.untrusted import shown

LOGS = "logs"
APPENDED = ("metrics.jsonl", "config.json", *LOCKS)
"""Files of a run that a resumed one opens again."""
_OPENED_INSIDE = (LOGS, "judge")
"""Folders in which it opens files that are there."""
MAX_SHOWN = 300


def folder_problems(run_dir: Path) -> list[str]:
    """What keeps `run_dir` from being a run's folder: what it or a folder above it is, and of one
    that is there, which of its files is a link or none, which of its folders and files take no
    writing."""
    if run_dir.resolve().parts[1:2] in (("proc",), ("sys",)):
        return [f"base_exp_dir: {shown(str(run_dir), MAX_SHOWN)} is the kernel's; name a folder"]
    for place in (run_dir, *run_dir.parents):
        why = not_a_file(place)
        if why == FOLDER:
            break
        if why != GONE:
            named = shown(str(place), MAX_SHOWN)
            return [f"base_exp_dir: {named} {why or 'is a file'}; name a folder"]
    if not_a_file(run_dir) != FOLDER:
        return []
    for place in _opened(run_dir):
        named = shown(str(place), MAX_SHOWN)
        if place.is_symlink():
            return [
                f"base_exp_dir: {named} is a link, and a run writes to no other file; remove it"
            ]
        if place.exists() and not place.is_file():
            return [f"base_exp_dir: {named} is no ordinary file; remove it"]
    inside = [entry for entry in run_dir.iterdir() if entry.is_dir() or entry.name in APPENDED]
    logs = (run_dir / LOGS).glob("*.log")
    shut = [place for place in (run_dir, *sorted(inside), *logs) if not _is_open(place)]
    why = "no permission, or a disk that is mounted to be read"
    return [_refusal(shut[0], why)] if shut else []


def make_problems(run_dir: Path) -> list[str]:
    """The same, with the folder made and tried: every rank's first act is to open its log there."""
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)  # nobody else's, until it is shared
        (run_dir / LOGS).mkdir(exist_ok=True)
    except OSError as error:
        return [_refusal(Path(error.filename or run_dir), error.strerror or str(error))]
    if problems := folder_problems(run_dir):
        return problems
    for folder in (run_dir, run_dir / LOGS):
        try:
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            return [_refusal(folder, error.strerror or str(error))]
    return []


def _opened(run_dir: Path) -> list[Path]:
    """What stands in the place of files that a run writes on in, folders left out, which may be
    links to another disk."""
    opened = [run_dir / name for name in APPENDED]
    for name in _OPENED_INSIDE:
        opened += sorted((run_dir / name).glob("*"))
    return [place for place in opened if not place.is_dir()]


def _is_open(place: Path) -> bool:
    mode = os.W_OK | (os.X_OK if place.is_dir() else 0)
    effective = os.access in os.supports_effective_ids
    return os.access(place, mode, effective_ids=effective)


def _refusal(place: Path, why: str) -> str:
    return (
        f"base_exp_dir: {shown(str(place), MAX_SHOWN)} cannot be written to ({why}); make it "
        "writable, or choose another folder"
    )
