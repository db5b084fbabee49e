"""Model files from folders or hub ids, quietly.

What: where a model's files lie on this machine, a folder of links to them, and loading without
progress bars. What not: what is in the files (each policy's own loading). Called by the policies'
loading parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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


@contextmanager
def only_download_bars() -> Iterator[None]:
    """Inside, of transformers' progress bars only that of a download stays: the hub's own."""
    from transformers.utils import logging

    previous = logging.set_tqdm_hook(
        lambda make, args, options: make(*args, **{**options, "disable": True})
    )
    try:
        yield
    finally:
        logging.set_tqdm_hook(previous)
