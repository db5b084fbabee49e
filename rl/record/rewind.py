"""Moves records of iterations that a resumed run will repeat to `<run>/set_aside/<time>/`."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterable
from itertools import count
from pathlib import Path

from rl.files import lines_of, read_object, row_of, write_atomically

SET_ASIDE = "set_aside"
MAX_NUMBERS = 10
ENTRY_NAMES = {
    "episodes": re.compile(r"it_(\d{6,})\.rank\d+\.jsonl"),
    "images": re.compile(r"it_(\d{6,})"),
    "thumbnails": re.compile(r"it_(\d{6,})"),
    "evaluation": re.compile(r"it_(\d{6,})"),
}
"""Folder of the run -> pattern of the names of its entries, one or more per iteration."""
PICTURE_NAME = re.compile(r"rank(\d+)_g\d{2,}_(?:source\d*|target|bare|m\d+)\.png")
"""Name of a picture in a folder of `images`; the captured number is the rank."""


def rewind(run_dir: Path, iteration: int) -> list[str]:
    """Move all records after `iteration` (-1: all records), and unreadable lines of
    metrics.jsonl, to a new folder; returns messages for the user."""
    metrics = run_dir / "metrics.jsonl"
    lines = enumerate(lines_of(metrics), 1)
    numbered = [(n, iteration_of(line), line) for n, line in lines if line.strip()]
    later = [line for _, it, line in numbered if it is None or it > iteration]
    kept = [line for _, it, line in numbered if it is not None and it <= iteration]
    damaged = [str(number) for number, it, _ in numbered if it is None]
    entries = {
        name: sorted(entry for entry, it in _entries(run_dir / name).items() if it > iteration)
        for name in ENTRY_NAMES
    }
    # A missing line of `iteration` itself is not reported, because it is written again.
    missing = _missing(f"{metrics} has no line", range(iteration), map(iteration_of, kept))
    if _is_recorded(run_dir, iteration):
        last, recorded = range(iteration, iteration + 1), _entries(run_dir / "episodes").values()
        missing += _missing(f"{run_dir / 'episodes'} has none", last, recorded)
    if not later and not any(entries.values()):
        return missing
    name = time.strftime("%Y%m%d-%H%M%S")
    names = (name if number == 1 else f"{name}-{number}" for number in count(1))
    folders = (run_dir / SET_ASIDE / name for name in names)
    folder = next(path for path in folders if not path.exists())
    folder.mkdir(parents=True)
    if later:
        write_atomically(folder / "metrics.jsonl", b"".join(later))
        write_atomically(metrics, b"".join(line.rstrip(b"\n") + b"\n" for line in kept))
    for name, paths in entries.items():
        for entry in paths:
            (folder / name).mkdir(exist_ok=True)
            shutil.move(entry, folder / name)  # `move`: pictures may be on another disk
    if (run_dir / "config.json").is_file():
        shutil.copy2(run_dir / "config.json", folder)
    counts = {"lines of metrics.jsonl": len(later) - len(damaged)}
    counts |= {f"of {name}/": len(paths) for name, paths in entries.items()}
    sentences = []
    if listed := ", ".join(f"{num} {kind}" for kind, num in counts.items() if num):
        reason = f"what was recorded after iteration {iteration} is done again, and"
        if iteration < 0:
            reason = (
                "no iteration is in a checkpoint, so the run begins again from the base weights; "
                "what was recorded before is"
            )
        sentences.append(f"{reason} set aside in {folder}: {listed}")
    if damaged:
        sentences.append(
            f"damaged lines of metrics.jsonl (number {', '.join(damaged)}) are left out of it, and "
            f"set aside in {folder}"
        )
    return sentences + missing


def _is_recorded(run_dir: Path, iteration: int) -> bool:
    """Whether the run's config, as of its last start, records the episodes of `iteration`."""
    try:
        config = read_object(run_dir / "config.json")
        every = (config or {})["tracking"]["log_episodes_every_n_iterations"]
        return iteration > 0 and iteration % every == 0
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError):
        return False


def _missing(subject: str, expected: range, present: Iterable[int | None]) -> list[str]:
    """A message about iterations whose records are lost for good; [] if there are none."""
    lost = sorted(set(expected).difference(present))
    if not lost:
        return []
    numbers = ", ".join(map(str, lost[:MAX_NUMBERS])) + ", ..." * (len(lost) > MAX_NUMBERS)
    return [f"{subject} of iteration {numbers}, which nothing makes again"]


def iteration_of(line: bytes) -> int | None:
    iteration = (row_of(line) or {}).get("iteration")
    return iteration if type(iteration) is int else None


def _entries(folder: Path) -> dict[Path, int]:
    if not folder.is_dir():
        return {}
    matches = {entry: ENTRY_NAMES[folder.name].fullmatch(entry.name) for entry in folder.iterdir()}
    return {entry: int(match[1]) for entry, match in matches.items() if match}
