"""Model files from folders or hub ids.

What: where a model's files lie on this machine, and a folder of links to them. What not: what is in
the files (each policy's own loading).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

TEXT_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
"""Everything of a model's repository but weights and code."""


def local_folder(
    path: str, revision: str | None = None, patterns: Sequence[str] | None = None
) -> Path:
    """The folder itself, or the hub's files of those patterns, fetched where need be."""
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    allowed = None if patterns is None else list(patterns)
    return Path(snapshot_download(path, revision=revision, allow_patterns=allowed))


def link_files(folder: Path, overlay: Path, skip: Sequence[str] = ()) -> None:
    """Link every file whose name holds none of `skip`, unless the overlay has one of that name."""
    for file in folder.iterdir():
        link = overlay / file.name
        if file.is_file() and not link.exists() and not any(part in file.name for part in skip):
            link.symlink_to(file.resolve())
