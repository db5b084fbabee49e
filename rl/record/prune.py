"""Deletes checkpoints that a run needs no more, for `rl runs prune`.

Of a run's checkpoints these stay: the newest that is whole, the best on held-out samples, and any
that is not exactly what the run wrote. Nothing else of a run is touched.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rl.checkpoints import checkpoint
from rl.checkpoints.checkpoint import iteration_of
from rl.record.run_lock import Use, to_oneself
from rl.record.run_summary import Summary, files_in
from rl.text.untrusted import shown

_MAX_SHOWN = 100
_IN_USE: dict[Use, str] = {
    "running": "running: stop it first",
    "unknown": "its locks cannot be read (another user's run, or a file system without locks)",
}


@dataclass(frozen=True)
class Plan:
    run_dir: Path
    going: Sequence[Path] = ()
    """What a kill left of a deletion, then folders of checkpoints, which are renamed to such."""
    num_bytes: int = 0
    left: Sequence[str] = ()


def plan(summary: Summary) -> Plan:
    """Changes nothing. The newest whole checkpoint is found by every file's sha256."""
    if summary.path.is_symlink():
        return Plan(summary.path, left=["it is a link to elsewhere; name that folder"])
    if why := summary.problem or _IN_USE.get(summary.use):
        return Plan(summary.path, left=[why])
    return _plan(summary.path)


def remove(planned: Plan, say: Callable[[str], None]) -> int:
    """Delete what was planned and may still go; returns the freed bytes. `say` gets the
    failures."""
    freed = 0
    with to_oneself(planned.run_dir) as use:
        if why := _IN_USE.get(use):
            say(f"{shown(planned.run_dir.name, _MAX_SHOWN)}: {why}")
            return 0
        still = set(_plan(planned.run_dir, hashes=False).going)
        for path in (path for path in planned.going if path in still):
            num_bytes = _size(path)
            try:
                checkpoint.discard(path)
                freed += num_bytes
            except OSError as error:
                name = shown(path.name, _MAX_SHOWN)
                say(f"{name} could not be deleted: {error.strerror or error}")
    return freed


def _plan(run_dir: Path, hashes: bool = True) -> Plan:
    folder = run_dir / "checkpoints"
    if folder.is_symlink():
        return Plan(run_dir, left=["checkpoints is a link to elsewhere"])
    steps, newest = checkpoint.steps_of(run_dir), checkpoint.find(run_dir, hashes).path
    stays = checkpoint.why_they_stay(run_dir)
    going, left = checkpoint.left_aside(run_dir), []
    for step in steps:
        if step == newest:
            why = "the newest that is whole"
        elif newest is None:
            why = "no checkpoint is whole"
        elif iteration_of(step) > iteration_of(newest):
            why = "damaged, and newer than what is whole"
        else:
            why = stays[step]
        if why:
            left.append(f"{step.name}: {why}")
        else:
            going.append(step)
    if going and not all(os.access(path, os.W_OK | os.X_OK) for path in (folder, *going)):
        owner = folder.stat().st_uid
        return Plan(run_dir, left=[f"this user may not delete there; user {owner} owns it"])
    left = left if going or len(left) > 1 else []
    return Plan(run_dir, going, sum(map(_size, going)), left)


def _size(path: Path) -> int:
    return sum(known.st_size for _, known in files_in(path))
