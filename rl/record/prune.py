"""Deletes checkpoints that a run needs no more, for `rl runs prune`.

What stays of a run's checkpoints: the newest that is whole, the best on held-out samples, and any
that is not exactly what the run wrote. Nothing else of a run is touched.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rl.record.checkpoint import (
    discard,
    find,
    iteration_of,
    left_aside,
    steps_of,
    why_best_stays,
    why_it_stays,
)
from rl.record.run_lock import Use, to_oneself
from rl.record.run_summary import Summary, files_in
from rl.record.untrusted import shown

_MAX_SHOWN = 100


@dataclass(frozen=True)
class Plan:
    """What goes of one run."""

    run_dir: Path
    going: Sequence[Path] = ()
    """Folders of checkpoints, and what a kill left of one."""
    num_bytes: int = 0
    left: Sequence[str] = ()
    """What is left alone, and why."""


def plan(summary: Summary) -> Plan:
    """Changes nothing. The newest whole checkpoint is told by every file's sha256."""
    if summary.path.is_symlink():
        return Plan(summary.path, left=["it is a link to elsewhere; name that folder"])
    if why := summary.problem or _in_use(summary.use):
        return Plan(summary.path, left=[why])
    return _plan(summary.path)


def remove(planned: Plan, say: Callable[[str], None]) -> int:
    """Delete what was planned and may still go; returns the bytes that are free. `say` gets a
    sentence for each that could not be deleted."""
    freed = 0
    with to_oneself(planned.run_dir) as use:
        if why := _in_use(use):
            say(f"{_named(planned.run_dir)}: {why}")
            return 0
        for path in _plan(planned.run_dir, hashes=False).going:
            if path not in planned.going:
                continue
            num_bytes = _size(path)
            try:
                discard(path)
                freed += num_bytes
            except OSError as error:
                say(f"{_named(path)} could not be deleted: {error.strerror or error}")
    return freed


def _in_use(use: Use) -> str:
    if use == "running":
        return "running: stop it first"
    if use == "unknown":
        return "its locks cannot be read (another user's run, or a file system without locks)"
    return ""


def _plan(run_dir: Path, hashes: bool = True) -> Plan:
    folder = run_dir / "checkpoints"
    if folder.is_symlink():
        return Plan(run_dir, left=["checkpoints is a link to elsewhere"])
    steps, newest = steps_of(run_dir), find(run_dir, hashes).path
    stay = {} if newest is None else {newest: "the newest that is whole"}
    for step in steps:
        if newest is None:
            stay[step] = "no checkpoint is whole"
        elif iteration_of(step) > iteration_of(newest):
            stay[step] = "damaged, and newer than what is whole"
    for path, why in why_best_stays(run_dir).items():
        stay.setdefault(path, why)
    going = left_aside(run_dir)
    for step in steps:
        if step not in stay:
            why = why_it_stays(step)
            stay |= {step: why} if why else {}
            going += [] if why else [step]
    if going and not all(os.access(path, os.W_OK | os.X_OK) for path in (folder, *going)):
        owner = folder.stat().st_uid
        return Plan(run_dir, left=[f"this user may not delete there; user {owner} owns it"])
    left = [f"{step.name}: {stay[step]}" for step in steps if step in stay]
    left = left if going or len(left) > 1 else []
    return Plan(run_dir, going, sum(map(_size, going)), left)


def _size(path: Path) -> int:
    return sum(known.st_size for _, known in files_in(path))


def _named(path: Path) -> str:
    return shown(path.name, _MAX_SHOWN)
