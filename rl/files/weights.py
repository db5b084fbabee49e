"""Weights in files: how many they are and whether they are whole, from the headers alone, and where
they lie once loaded."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

ALIGNMENT_BYTES = 64
"""Of what PyTorch allocates on the CPU."""
LFS_POINTER = b"version https://git-lfs"
"""How a file begins that was cloned without its content."""


def num_parameters(
    folder: str | Path, is_counted: Callable[[str], bool] = lambda name: True
) -> float:
    """Parameters in the safetensors files of one folder, of the tensors that `is_counted`."""
    headers = map(_header, Path(folder).glob("*.safetensors"))
    return float(
        sum(math.prod(t["shape"]) for h in headers for name, t in h.items() if is_counted(name))
    )


def align_weights(module: torch.nn.Module, device: str) -> None:
    """Where the CPU computes, give weights the alignment of memory that PyTorch allocates.

    Loaded weights are pages of their file, at whatever offset its header leaves, and some of MKL's
    kernels (one row in float32, on AMD or with SSE4.2) add up in another order at an address that
    is no multiple of 16 bytes. A run would then hang on how its models' files were written. On a
    GPU every weight is a copy, aligned; what is left behind on the CPU stays pages.
    """
    if device != "cpu":
        return
    for tensor in [*module.parameters(), *module.buffers()]:
        if tensor.data_ptr() % ALIGNMENT_BYTES:
            tensor.data = tensor.data.clone()


def damage_of(file: Path) -> str:
    """Why a file of weights is not whole, or ''; only of safetensors is more known than that it is
    empty, or a pointer of Git LFS."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(len(LFS_POINTER))
    if start == LFS_POINTER:
        return f"{file} is a pointer of Git LFS, not the weights; fetch them (git lfs pull)"
    again = "copy or download it again"
    if file.suffix != ".safetensors":
        return "" if size else f"{file} is empty; {again}"
    try:
        ends = [tensor["data_offsets"][1] for tensor in _header(file).values()]
        expected = 8 + int.from_bytes(start[:8], "little") + max(ends, default=0)
    except (ValueError, RecursionError, AttributeError, LookupError, TypeError):
        return f"{file} has no readable header of safetensors ({size} bytes); {again}"
    return "" if size == expected else f"{file} has {size} bytes instead of {expected}; {again}"


def _header(file: Path) -> dict[str, dict[str, Any]]:
    """The first 8 bytes are the length of a JSON header. Raises ValueError where it is longer than
    the file."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > file.stat().st_size:
            raise ValueError(f"{file}: a header of {length} bytes")
        header = json.loads(stream.read(length))
    return {name: tensor for name, tensor in header.items() if name != "__metadata__"}
