"""Summarises a folder of runs: how far each is, how good, how large, and whether it is in use."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rl.config import loading
from rl.config.loading import nearest, not_a_file
from rl.files import read_object
from rl.printing import excerpt
from rl.ranks.signals import remedy
from rl.record.checkpoint import SAVE_LOCK, find, format_problem, held_out_rewards, iteration_of

RUNS_VARIABLE = "APP__BASE_EXP_DIR"
"""Names the folder of runs; default: runs/."""
LOCKS = (".lock", SAVE_LOCK)
_MAX_SHOWN = 200
_MAX_PLANNED = 11


@dataclass(frozen=True)
class Summary:
    """Summary of one folder. Sizes are sums of its files' bytes; links are not followed."""

    path: Path
    problem: str = ""
    system: str = ""
    """The renderer's plugin, or the policy's if there is no renderer."""
    done: int = 0
    planned: str = ""
    held_out: float | None = None
    best: float | None = None
    num_bytes: int = 0
    written_s: float = 0.0
    """When its metrics were last written, s since 1970."""
    is_running: bool = False
    checkpoint: int | None = None
    """Iteration of the newest checkpoint whose files all have their full size."""


def summarise(path: Path) -> Summary:
    """Summarise a folder that may be a run's. Changes nothing and never raises."""
    try:
        return _summary(path)
    except OSError as error:
        return Summary(path, f"cannot be read ({excerpt(remedy(error), _MAX_SHOWN)})")
    except ValueError as error:
        return Summary(path, excerpt(str(error), _MAX_SHOWN))


def folders(parent: Path) -> list[Path]:
    """Folders that may be runs: `parent` itself if it is one, else its subfolders."""
    if _is_started(parent):
        return [parent]
    return sorted(entry for entry in parent.iterdir() if entry.is_dir())


def not_a_run(path: str | Path) -> str:
    """A message: `path` is no run folder; the run with the most similar name, or the known ones."""
    path = Path(path)
    if _is_started(path):
        file = path / "metrics.jsonl"
        return f"{file} {not_a_file(file)}; a run writes this file when its first iteration is done"
    places = [path.parent, Path(os.environ.get(RUNS_VARIABLE) or "runs")]
    found = (run for place in places if place.is_dir() for run in folders(place))
    names = [str(run) for run in found if _is_started(run)]
    hint = nearest(str(path), names) if names else f"there are no runs in {places[1]}/"
    state = "is no run folder" if path.exists() else "does not exist"
    return f"{excerpt(str(path), _MAX_SHOWN)} {state}; {excerpt(hint, 3 * _MAX_SHOWN)}"


def _is_started(path: Path) -> bool:
    if any((path / name).is_file() for name in LOCKS):
        return True
    file = path / "config.json"
    with suppress(OSError):  # a model's folder has such a file, too
        return file.is_file() and "run_name" in (read_object(file) or {})
    return False


def _summary(path: Path) -> Summary:
    if not _is_started(path):
        return Summary(path, "no run")
    metrics = path / "metrics.jsonl"
    written_s = (metrics if metrics.is_file() else path).stat().st_mtime
    num_bytes, is_running = _num_bytes(path), is_in_use(path)
    partial = Summary(path, num_bytes=num_bytes, written_s=written_s, is_running=is_running)
    if problem := format_problem(path):
        return replace(partial, problem=excerpt(problem, _MAX_SHOWN))
    file = path / "config.json"
    if not file.exists():
        return replace(partial, problem="it has no config.json: the run is loading, or has failed")
    config = read_object(file)
    if config is None or not isinstance(config.get("policy"), dict) or "run_name" not in config:
        return replace(partial, problem="its config.json is damaged")
    config = loading.stored(config, str(file))
    newest = find(path, hashes=False)
    checkpoint = None if newest.path is None else iteration_of(newest.path)
    rewards_of = held_out_rewards(path)
    rewards = [reward for reward in rewards_of.values() if reward is not None]
    planned = config.get("num_iterations") or f"{config.get('num_epochs', '?')} epochs"
    return replace(
        partial,
        system=_system(config),
        done=max(rewards_of),
        planned=excerpt(str(planned), _MAX_PLANNED),
        held_out=rewards[-1] if rewards else None,
        best=max(rewards, default=None),
        checkpoint=checkpoint,
    )


def _system(config: Mapping[str, Any]) -> str:
    for section in (config.get("renderer"), config.get("policy")):
        name = str(section.get("type")) if isinstance(section, dict) else "none"
        if name != "none":
            return name.rpartition(".")[2]
    return "?"


def _num_bytes(path: Path) -> int:
    """The bytes of its files; links are not followed."""
    num_bytes = 0
    for file in path.rglob("*"):
        with suppress(FileNotFoundError):  # it has just been deleted
            status = file.lstat()
            num_bytes += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return num_bytes


def is_in_use(run_dir: Path) -> bool:
    """Whether a run, or a rank that is saving, holds a file lock in that folder."""
    return any(is_locked(run_dir / name) for name in LOCKS)


def is_locked(path: Path) -> bool:
    """Whether a process holds a lock of that file, which need not exist. False on a file system
    without locks."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    finally:
        os.close(descriptor)
    return False
