"""A run that goes on from a checkpoint does again what came after it: that record is set aside.

What: `rewind`, and the layout

    <run>/set_aside/20261121-100203/metrics.jsonl   the lines, byte for byte, damaged ones too
    <run>/set_aside/20261121-100203/config.json     what they were made under
    <run>/set_aside/20261121-100203/episodes/...    and images/, evaluation/, as they were

What not: judge replies, which are used again (`judge/journal.py`). Nothing is deleted, and nothing
is moved that does not bear exactly a name that a run gives. Called by `run_record.py`.
"""

from __future__ import annotations

import re
import shutil
import time
from itertools import count
from pathlib import Path

from rl.files.atomic import lines_of, row_of, write_atomically

SET_ASIDE = "set_aside"
_NAMES = {
    "episodes": re.compile(r"it_(\d{6,})\.rank\d+\.jsonl"),
    "images": re.compile(r"it_(\d{6,})"),
    "evaluation": re.compile(r"it_(\d{6,})"),
}
"""Folder of the run -> what an iteration's entry is called in it."""


def rewind(run_dir: Path, iteration: int) -> list[str]:
    """Move everything recorded after `iteration` (-1: all of it), and every line of the metrics
    that cannot be read, to a new folder; returns what to tell the user."""
    metrics = run_dir / "metrics.jsonl"
    kept: list[bytes] = []
    past: list[bytes] = []
    damaged: list[int] = []
    for number, line in enumerate(lines_of(metrics) if metrics.is_file() else [], start=1):
        done = iteration_of(line)
        if done is None and line.strip():
            damaged.append(number)
        if done is not None and done <= iteration:
            kept.append(line.rstrip(b"\n") + b"\n")
        elif line.strip():
            past.append(line)
    entries = {name: _entries_after(run_dir / name, iteration) for name in _NAMES}
    if not past and not any(entries.values()):
        return []
    folder = _new_folder(run_dir / SET_ASIDE)
    if past:
        write_atomically(folder / "metrics.jsonl", b"".join(past))
        write_atomically(metrics, b"".join(kept))
    for name, found in entries.items():
        for entry in found:
            (folder / name).mkdir(exist_ok=True)
            shutil.move(entry, folder / name)  # pictures may lie on another disk
    if (run_dir / "config.json").is_file():
        shutil.copy2(run_dir / "config.json", folder)
    counts = {"lines of metrics.jsonl": len(past) - len(damaged)}
    counts |= {f"of {name}/": len(found) for name, found in entries.items()}
    return _sentences(folder, iteration, counts, damaged)


def iteration_of(line: bytes) -> int | None:
    """Which iteration a line of the metrics is about; None for one that is damaged."""
    done = (row_of(line) or {}).get("iteration")
    return done if type(done) is int else None


def _entries_after(folder: Path, iteration: int) -> list[Path]:
    if not folder.is_dir():
        return []
    matches = [(entry, _NAMES[folder.name].fullmatch(entry.name)) for entry in folder.iterdir()]
    return sorted(entry for entry, match in matches if match and int(match[1]) > iteration)


def _new_folder(parent: Path) -> Path:
    name = time.strftime("%Y%m%d-%H%M%S")
    for number in count(1):
        folder = parent / (name if number == 1 else f"{name}-{number}")
        if not folder.exists():
            break
    folder.mkdir(parents=True)
    return folder


def _sentences(
    folder: Path, iteration: int, counts: dict[str, int], damaged: list[int]
) -> list[str]:
    said = []
    listed = ", ".join(f"{num} {what}" for what, num in counts.items() if num)
    if listed and iteration < 0:
        said.append(
            f"no iteration is in a checkpoint, so the run begins again from the base weights; what "
            f"was recorded before is set aside in {folder}: {listed}"
        )
    elif listed:
        said.append(
            f"what was recorded after iteration {iteration} is done again, and set aside in "
            f"{folder}: {listed}"
        )
    if damaged:
        numbers = ", ".join(map(str, damaged))
        said.append(
            f"damaged lines of metrics.jsonl (number {numbers}) are left out of it, and set aside "
            f"in {folder}"
        )
    return said
