"""Shifts the tensors in model files, as a header of another length does."""

from __future__ import annotations

from pathlib import Path

import torch

ALIGNMENT_BYTES = 64


def displace(folder: Path) -> Path:
    """Rewrites every safetensors file of the folder with the same tensors, so that the first one
    begins 4 bytes after a multiple of 16."""
    files = sorted(folder.rglob("*.safetensors"))
    assert files, folder
    for file in files:
        old = file.read_bytes()
        start = 8 + int.from_bytes(old[:8], "little")
        header = old[8:start].rstrip(b" ")
        header += b" " * (-(4 + len(header)) % 16)
        file.write_bytes(len(header).to_bytes(8, "little") + header + old[start:])
    return folder


def num_askew(module: torch.nn.Module) -> int:
    """Number of tensors whose addresses do not have the alignment of PyTorch's allocator."""
    tensors = [*module.parameters(), *module.buffers()]
    return sum(tensor.data_ptr() % ALIGNMENT_BYTES > 0 for tensor in tensors)
