"""Counts of a rehearsal: bytes by device and phase, FLOPs, host waits and mixed dtypes by line."""

from __future__ import annotations

import sys
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType

import torch
from torch.utils.weak import WeakIdKeyDictionary

ROOT = Path(__file__).parents[1]
"""The project's package."""
BLOCK_BYTES = 512
"""PyTorch's allocator on CUDA rounds every allocation up to this."""


@cache
def _place(path: str) -> tuple[str, str]:
    """(place of a source file in this project, its place in a library), '' where it is in none."""
    file = Path(path)
    if file.is_relative_to(ROOT):
        return str(file.relative_to(ROOT.parent)) * (file.parent != Path(__file__).parent), ""
    _, found, library = path.partition("/site-packages/")
    return "", library * (bool(found) and "/torch/" not in path)


def calling_line() -> str:
    """'rl/file.py:12 (library/file.py:34)': the project's innermost line, and the library's that it
    called; '(backward)' where autograd calls by itself."""
    frame: FrameType | None = sys._getframe(1)
    library = ""
    while frame is not None:
        ours, theirs = _place(frame.f_code.co_filename)
        if ours:
            return f"{ours}:{frame.f_lineno}{library}"
        if theirs and not library:
            library = f" ({theirs}:{frame.f_lineno})"
        frame = frame.f_back
    return f"(backward){library}"


class Tally:
    """The counts of one rehearsal. Storages are counted once, whatever views of them exist."""

    def __init__(self) -> None:
        self.phase = "load"
        self.now: Counter[str] = Counter()
        """Device type -> bytes that exist."""
        self.peak: Counter[str] = Counter()
        """Phase -> most bytes that existed at once on the GPU in that phase."""
        self.waits: defaultdict[str, Counter[str]] = defaultdict(Counter)
        """Phase -> 'kind of wait: line' -> number."""
        self.mixed_dtypes: Counter[str] = Counter()
        """'operation of dtype and dtype: line' -> number."""
        self.flops: Counter[str] = Counter()
        """Phase -> floating-point operations of matrix products, convolutions and attention."""
        self._seen: WeakIdKeyDictionary = WeakIdKeyDictionary()

    @contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """Count what happens inside as part of `phase`; phases may be nested and repeated."""
        before, self.phase = self.phase, phase
        self._note_peak()
        try:
            yield
        finally:
            self.phase = before
            self._note_peak()

    def wait(self, kind: str) -> None:
        """Note that the host waits for the GPU."""
        self.waits[self.phase][f"{kind}: {calling_line()}"] += 1

    def track(self, tensor: torch.Tensor) -> None:
        """Count the tensor's storage until it is freed."""
        storage = tensor.untyped_storage()
        if storage in self._seen:
            return
        device = tensor.device.type
        self._seen[storage] = size = -(-storage.nbytes() // BLOCK_BYTES) * BLOCK_BYTES
        self.now[device] += size
        self._note_peak()
        weakref.finalize(storage, self._freed, device, size)

    def _freed(self, device: str, size: int) -> None:
        self.now[device] -= size

    def _note_peak(self) -> None:
        self.peak[self.phase] = max(self.peak[self.phase], self.now["cuda"])
