"""Checks that a run's folder can be used: it is a folder, writable, with ordinary files."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from rl.config.loading import FOLDER, GONE, not_a_file
from rl.printing import excerpt
from rl.record.run_summary import LOCKS

LOGS = "logs"
APPENDED = ("metrics.jsonl", "config.json", *LOCKS)
"""Existing files in the run folder that a resumed run opens for writing."""
_OPENED_INSIDE = (LOGS, "judge")
"""Folders in the run folder in which a resumed run opens existing files for writing."""


def folder_problems(run_dir: Path) -> list[str]:
    """Why `run_dir` cannot be a run's folder: it or a parent is not a folder, one of its files is a
    link or not a regular file, or one of its folders or files is not writable."""
    if run_dir.resolve().parts[1:2] in (("proc",), ("sys",)):
        return _problem(run_dir, "belongs to the kernel; name another folder")
    if run_dir.parts[0].startswith("~"):
        return _problem(run_dir, "begins with ~, which only a shell replaces; write it out")
    for path in (run_dir, *run_dir.parents):
        why = not_a_file(path)
        if why == FOLDER:
            break
        if why != GONE:
            return _problem(path, f"{why or 'is a file'}; name a folder")
    if not_a_file(run_dir) != FOLDER:
        return []
    opened_paths = [run_dir / name for name in APPENDED]
    opened_paths += [file for name in _OPENED_INSIDE for file in sorted((run_dir / name).glob("*"))]
    for path in opened_paths:  # folders may be links to another disk
        if path.is_symlink() and not path.is_dir():
            return _problem(path, "is a link, and a run does not write through links; remove it")
        if path.exists() and not (path.is_file() or path.is_dir()):
            return _problem(path, "is not an ordinary file; remove it")
    entries = [entry for entry in run_dir.iterdir() if entry.is_dir() or entry.name in APPENDED]
    for path in (run_dir, *sorted(entries), *(run_dir / LOGS).glob("*.log")):
        mode = os.W_OK | (os.X_OK if path.is_dir() else 0)
        if not os.access(path, mode, effective_ids=os.access in os.supports_effective_ids):
            return _read_only(path, "no permission, or a read-only disk")
    return []


def create_and_check(run_dir: Path) -> list[str]:
    """Create the folder and its `logs`, where ranks write first; return its `folder_problems`."""
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)  # private until the user shares it
        (run_dir / LOGS).mkdir(exist_ok=True)
        if problems := folder_problems(run_dir):
            return problems
        for folder in (run_dir, run_dir / LOGS):
            tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return _read_only(Path(error.filename or run_dir), error.strerror or str(error))
    return []


def _read_only(path: Path, why: str) -> list[str]:
    return _problem(path, f"cannot be written to ({why}); make it writable or use another folder")


def _problem(path: Path, problem: str) -> list[str]:
    return [f"base_exp_dir: {excerpt(str(path), 300)} {problem}"]
