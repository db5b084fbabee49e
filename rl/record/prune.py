"""What of a run may go to make room, and how it goes.

What: `plan`, by rules, and `remove`. A run's record (config, metrics, episodes, evaluations, logs),
the models kept for ever and `steps_that_stay` are never touched, nor a run that is in use, nor
anything that does not bear exactly a name that a run gives, nor what a link leads to. What not:
asking (`commands/runs.py`), what a run prunes itself (`checkpoint.py`, `run_record.py`).
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rl.record.best import read_best
from rl.record.checkpoint import (
    discard,
    find,
    foreign_entry,
    iteration_of,
    left_aside,
    steps_of,
)
from rl.record.rewind import ENTRY_NAMES, PICTURE_NAME
from rl.record.run_lock import to_oneself, use_of
from rl.record.run_summary import Summary, files_in
from rl.record.untrusted import shown

Kind = Literal["pictures", "checkpoints"]
"""pictures: of training, in images/; checkpoints: all but `steps_that_stay`."""
_MAX_SHOWN = 100


@dataclass(frozen=True)
class Going:
    """A picture, or a checkpoint's folder."""

    path: Path
    num_bytes: int
    kind: Kind


@dataclass(frozen=True)
class Plan:
    """Of one run."""

    run_dir: Path
    going: Sequence[Going] = ()
    left: Sequence[str] = ()
    """What is left alone, and why."""

    @property
    def num_bytes(self) -> int:
        return sum(going.num_bytes for going in self.going)


def steps_that_stay(run_dir: Path, hashes: bool = True) -> dict[Path, str]:
    """Checkpoints that no rule takes, and why: the newest whole one, from which the run would go
    on, the best on held-out samples, and what is newer than both and damaged. `hashes`: whole by
    every file's sha256, else by their sizes."""
    newest, best = find(run_dir, hashes).path, read_best(run_dir)
    stay = {}
    for step in steps_of(run_dir):
        if newest is None:
            stay[step] = "no checkpoint is whole"
        elif step == newest:
            stay[step] = "the newest that is whole"
        elif iteration_of(step) > iteration_of(newest):
            stay[step] = "damaged, and newer than what is whole"
        elif best is not None and step.name == best.name:
            stay[step] = "the best on held-out samples"
    return stay


def plan(summary: Summary, kinds: Sequence[Kind]) -> Plan:
    """What goes of a run. Changes nothing."""
    run_dir = summary.path
    if run_dir.is_symlink():
        return Plan(run_dir, left=["it is a link to elsewhere; name that folder"])
    if summary.problem:
        return Plan(run_dir, left=[summary.problem])
    if why := _in_use(use_of(run_dir)):
        return Plan(run_dir, left=[why])
    return _plan(run_dir, kinds)


def remove(planned: Plan, kinds: Sequence[Kind], say: Callable[[str], None]) -> int:
    """Delete what was planned and may still go; returns the bytes that are free. `say` hears of
    what could not be deleted."""
    freed = 0
    wanted = {going.path for going in planned.going}
    with to_oneself(planned.run_dir) as use:
        if why := _in_use(use):
            say(f"{_named(planned.run_dir)}: {why}")
            return 0
        # What was planned was held against every sha256; sizes tell whether that still holds.
        for going in _plan(planned.run_dir, kinds, hashes=False).going:
            if going.path not in wanted:
                continue
            try:
                discard(going.path) if going.kind == "checkpoints" else going.path.unlink()
                freed += going.num_bytes
            except OSError as error:
                say(f"{_named(going.path)} could not be deleted: {error.strerror or error}")
        for folder in {path.parent for path in wanted}:
            if ENTRY_NAMES["images"].fullmatch(folder.name):
                with suppress(OSError):  # something else is in it
                    folder.rmdir()
    return freed


def _in_use(use: str) -> str:
    if use == "running":
        return "running: stop it first"
    if use == "unknown":
        return (
            "whether it is running cannot be told: this file system has no locks, or forbids them"
        )
    return ""


def _plan(run_dir: Path, kinds: Sequence[Kind], hashes: bool = True) -> Plan:
    going: list[Going] = []
    left: list[str] = []
    if "pictures" in kinds:
        going += _pictures(run_dir, left)
    if "checkpoints" in kinds:
        going += _checkpoints(run_dir, hashes, left)
    return Plan(run_dir, going, left)


def _pictures(run_dir: Path, left: list[str]) -> Iterator[Going]:
    images = run_dir / "images"
    if images.is_symlink():
        left.append("images is a link to elsewhere")
        return
    folders = sorted(images.iterdir()) if images.is_dir() else []
    for folder in folders:
        if folder.is_symlink() or not ENTRY_NAMES["images"].fullmatch(folder.name):
            left.append(f"images/{_named(folder)} is none of the run's")
            continue
        for file in sorted(folder.iterdir()):
            known = file.lstat()
            if PICTURE_NAME.fullmatch(file.name) and stat.S_ISREG(known.st_mode):
                yield Going(file, known.st_size, "pictures")
            else:
                left.append(f"images/{folder.name}/{_named(file)} is none of the run's")


def _checkpoints(run_dir: Path, hashes: bool, left: list[str]) -> Iterator[Going]:
    if (run_dir / "checkpoints").is_symlink():
        left.append("checkpoints is a link to elsewhere")
        return
    stay = steps_that_stay(run_dir, hashes)
    older = [step for step in steps_of(run_dir) if step not in stay]
    if older:
        left += [f"{step.name}: {why}" for step, why in stay.items()]
    for path in [*left_aside(run_dir), *older]:
        if path.is_symlink() or not path.is_dir():
            left.append(f"{path.name} is a link or a file")
        elif foreign := foreign_entry(path):
            left.append(f"{path.name} holds {shown(foreign, _MAX_SHOWN)}, none of the run's")
        else:
            num_bytes = sum(known.st_size for _, known in files_in(path))
            yield Going(path, num_bytes, "checkpoints")


def _named(path: Path) -> str:
    return shown(path.name, _MAX_SHOWN)
