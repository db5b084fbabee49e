"""Counts of a rehearsal: bytes by device and phase, FLOPs, host waits and mixed dtypes by line."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch
from torch.utils.weak import WeakIdKeyDictionary

ROOT = Path(__file__).parents[1]
"""The project's package."""
BLOCK_BYTES = 512
"""PyTorch's allocator on CUDA rounds every allocation up to this."""


class Line(NamedTuple):
    """Where something happened: the project's innermost line, and the library's that it called."""

    ours: str
    library: str

    def __str__(self) -> str:
        return f"{self.ours} ({self.library})" if self.library else self.ours


def calling_line() -> Line:
    """The line of the project that is running; '(backward)' where autograd calls by itself."""
    frame: FrameType | None = sys._getframe(1)
    library = ""
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(ROOT):
            if file.parent != Path(__file__).parent:
                return Line(f"{file.relative_to(ROOT.parent)}:{frame.f_lineno}", library)
        elif not library and "site-packages" in file.parts and "torch" not in file.parts:
            library = "/".join(file.parts[file.parts.index("site-packages") + 1 :])
            library += f":{frame.f_lineno}"
        frame = frame.f_back
    return Line("(backward)", library)


class Tally:
    """The counts of one rehearsal. Storages are counted once, whatever views of them exist."""

    def __init__(self) -> None:
        self.phase = "load"
        self.now: Counter[str] = Counter()
        """Device type -> bytes that exist."""
        self.peak: dict[tuple[str, str], int] = {}
        """(Phase, device type) -> peak of the bytes that existed in that phase."""
        self.waits: Counter[tuple[str, str, Line]] = Counter()
        """(Phase, kind of wait, line) -> number."""
        self.wrong: Counter[tuple[str, Line]] = Counter()
        """(What is wrong with an operation's inputs, line) -> number."""
        self.flops: Counter[str] = Counter()
        """Phase -> floating-point operations of matrix products, convolutions and attention."""
        self.num_ops = 0
        self.live: Counter[str] = Counter()
        """Line of the project -> bytes on the GPU that it allocated and that still exist."""
        self.held: dict[str, Counter[str]] = {}
        """Phase -> `live` when it last ended."""
        self._seen: WeakIdKeyDictionary = WeakIdKeyDictionary()

    @contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """Count what happens inside as part of `phase`; phases may be nested and repeated."""
        before, self.phase = self.phase, phase
        self._note_peak("cuda")
        try:
            yield
        finally:
            self.held[phase] = +self.live
            self.phase = before
            self._note_peak("cuda")

    def wait(self, kind: str) -> None:
        """Note that the host waits for the GPU."""
        self.waits[self.phase, kind, calling_line()] += 1

    def track(self, tensor: torch.Tensor) -> None:
        """Count the tensor's storage until it is freed."""
        storage = tensor.untyped_storage()
        if storage in self._seen:
            return
        device = tensor.device.type
        size = -(-storage.nbytes() // BLOCK_BYTES) * BLOCK_BYTES
        self._seen[storage] = size
        self.now[device] += size
        self._note_peak(device)
        line = str(calling_line()) if device == "cuda" else ""
        self.live[line] += size
        weakref.finalize(storage, self._freed, device, size, line)

    def _freed(self, device: str, size: int, line: str) -> None:
        self.now[device] -= size
        self.live[line] -= size

    def _note_peak(self, device: str) -> None:
        key = self.phase, device
        self.peak[key] = max(self.peak.get(key, 0), self.now[device])
