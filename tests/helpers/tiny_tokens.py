"""Writes tokenised edits in the format of EARL's published `.pth` files."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch


def fields(number: int, **changes: Any) -> dict[str, Any]:
    """The contents of a published `.pth`, with codes below 64."""
    rng = np.random.default_rng(number)
    return {
        "edit_id": f"{number}.pth",
        "original_image": rng.integers(0, 64, (4, 6)),
        "edited_image": rng.integers(0, 64, (4, 6)),
        "CoT": {"thinking": f"thought {number}"},
        "instruction": f"make it {number}",
    } | changes


def save_published(folder: Path, numbers: range) -> list[str]:
    """Writes one .pth for each number; returns their names."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"{number}.pth" for number in numbers]
    for number, name in zip(numbers, names, strict=True):
        torch.save(fields(number), folder / name)
    return names


def write_list(file: Path, entries: list[str], **more: Any) -> str:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({**more, "path_list": entries}))
    return str(file)


def published(folder: Path, num: int) -> str:
    """Writes a list of that many files in the published layout; returns its path."""
    entries = save_published(folder / "feature", range(num))
    return write_list(folder / "list" / "tokenized_datalist.json", entries)


def rename_globals(file: Path, old: bytes, new: bytes) -> None:
    """Renames a module in a `.pth`'s pickle, as if another numpy had written it."""
    with zipfile.ZipFile(file) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    assert any(old in content for content in members.values())
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members.items():
            is_pickle = name.endswith("data.pkl")
            archive.writestr(name, content.replace(old, new) if is_pickle else content)
