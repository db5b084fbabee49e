"""Progress bars of libraries, kept off a run's console."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


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
