"""A run that goes on from a checkpoint does again what came after it: that record is set aside.

What: `rewind`, and the layout

    <run>/set_aside/20261121-100203/metrics.jsonl   the lines, byte for byte, damaged ones too
    <run>/set_aside/20261121-100203/config.json     what they were made under
    <run>/set_aside/20261121-100203/episodes/...    and images/, evaluation/, as they were

What not: judge replies, which are used again (`judge/journal.py`). Nothing is deleted, and nothing
is moved that does not bear exactly a name that a run gives.
"""

from __future__ import annotations

import re
import shutil
import time
from itertools import count
from pathlib import Path

from rl.files.atomic import lines_of, row_of, write_atomically

SET_ASIDE = "set_aside"
ENTRY_NAMES = {
    "episodes": re.compile(r"it_(\d{6,})\.rank\d+\.jsonl"),
    "images": re.compile(r"it_(\d{6,})"),
    "evaluation": re.compile(r"it_(\d{6,})"),
}
"""Folder of the run -> what an iteration's entry is called in it."""


def rewind(run_dir: Path, iteration: int) -> list[str]:
    """Move everything recorded after `iteration` (-1: all of it), and every line of the metrics
    that cannot be read, to a new folder; returns what to tell the user."""
    metrics = run_dir / "metrics.jsonl"
    lines = lines_of(metrics) if metrics.is_file() else []
    read = [(n, iteration_of(line), line) for n, line in enumerate(lines, 1) if line.strip()]
    past = [line for _, done, line in read if done is None or done > iteration]
    kept = [line for _, done, line in read if done is not None and done <= iteration]
    damaged = [number for number, done, _ in read if done is None]
    entries = {name: _entries_after(run_dir / name, iteration) for name in ENTRY_NAMES}
    if not past and not any(entries.values()):
        return []
    folder = _new_folder(run_dir / SET_ASIDE)
    if past:
        write_atomically(folder / "metrics.jsonl", b"".join(past))
        write_atomically(metrics, b"".join(line.rstrip(b"\n") + b"\n" for line in kept))
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
    matches = [
        (entry, ENTRY_NAMES[folder.name].fullmatch(entry.name)) for entry in folder.iterdir()
    ]
    return sorted(entry for entry, match in matches if match and int(match[1]) > iteration)


def _new_folder(parent: Path) -> Path:
    name = time.strftime("%Y%m%d-%H%M%S")
    names = (name if number == 1 else f"{name}-{number}" for number in count(1))
    folder = next(parent / name for name in names if not (parent / name).exists())
    folder.mkdir(parents=True)
    return folder


def _sentences(
    folder: Path, iteration: int, counts: dict[str, int], damaged: list[int]
) -> list[str]:
    said = []
    listed = ", ".join(f"{num} {what}" for what, num in counts.items() if num)
    if listed:
        why = f"what was recorded after iteration {iteration} is done again, and"
        if iteration < 0:
            why = (
                "no iteration is in a checkpoint, so the run begins again from the base weights; "
                "what was recorded before is"
            )
        said.append(f"{why} set aside in {folder}: {listed}")
    if damaged:
        numbers = ", ".join(map(str, damaged))
        said.append(
            f"damaged lines of metrics.jsonl (number {numbers}) are left out of it, and set aside "
            f"in {folder}"
        )
    return said
