"""Counts and checks weights by their file headers, aligns them in memory, and checksums them."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

ALIGNMENT_BYTES = 64
"""Alignment of the memory that PyTorch allocates on the CPU."""
NUM_COLUMNS = 1024
"""Width of the matrix into which `bit_sums` reshapes a tensor, in 64-bit numbers."""
LFS_POINTER = b"version https://git-lfs"


def num_parameters(
    folder: str | Path, is_counted: Callable[[str], bool] = lambda name: True
) -> float:
    """Number of parameters of a folder's safetensors tensors whose name `is_counted` accepts."""
    headers = map(_header, Path(folder).glob("*.safetensors"))
    return float(
        sum(math.prod(t["shape"]) for h in headers for name, t in h.items() if is_counted(name))
    )


class NotFiniteError(ValueError):
    """Weights contain NaN or infinity."""


def require_finite(weights: Iterable[tuple[str, torch.Tensor]], owner: str) -> None:
    """Raise NotFiniteError naming `owner` and its first weight with NaN or infinity. Skips 8-bit
    weights, which come with separate scales."""
    for name, weight in weights:
        if weight.is_floating_point() and weight.element_size() > 1 and not weight.is_meta:
            are_numbers = weight.detach().isfinite()
            if not are_numbers.all():
                num_bad = weight.numel() - int(are_numbers.sum())
                raise NotFiniteError(
                    f"{owner} holds NaN or infinity: {num_bad} of the {weight.numel()} numbers of "
                    f"{name}; copy or download it again, or name another"
                )


def align_weights(module: torch.nn.Module, device: str) -> None:
    """On the CPU, copy weights to addresses aligned as PyTorch's allocator does. Loaded weights are
    memory-mapped from their file, and some MKL kernels (one row in float32, on AMD or with SSE4.2)
    sum in another order at addresses that are not multiples of 16 bytes. It also raises
    NotFiniteError for NaN and infinity, because every loaded model passes through it."""
    require_finite(module.named_parameters(), type(module).__name__)
    if device != "cpu":
        return
    for tensor in [*module.parameters(), *module.buffers()]:
        if tensor.data_ptr() % ALIGNMENT_BYTES:
            tensor.data = tensor.data.clone()


def bit_sums(tensor: torch.Tensor) -> torch.Tensor:
    """[3] int64 checksums on the tensor's device. Its bytes, as 64-bit numbers, form a matrix and a
    remainder; the checksums are weighted sums over rows, over columns and of the remainder ([1] if
    all is remainder). A changed bit and swapped values or rows change them. No temporary is as
    large as the tensor."""
    import torch

    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if flat.storage_offset() % 8 or flat.numel() % 8:
        flat = torch.nn.functional.pad(flat, (0, -flat.numel() % 8)).clone()
    numbers = flat.view(torch.int64)
    num_whole = len(numbers) // NUM_COLUMNS * NUM_COLUMNS
    matrix, tail = numbers[:num_whole].view(-1, NUM_COLUMNS), numbers[num_whole:]
    lines = (matrix.sum(1), matrix.sum(0), tail) if len(matrix) else (tail,)
    return torch.stack([(line * _line_weights(len(line), line.device)).sum() for line in lines])


@lru_cache(maxsize=64)
def _line_weights(length: int, device: torch.device) -> torch.Tensor:
    """[n] int64 odd pseudorandom weights: splitmix64 of 1 .. n (Steele et al. 2014, "Fast
    splittable pseudorandom number generators"), with signed shifts."""
    import torch

    mixed = torch.arange(1, length + 1, device=device)
    mixed = (mixed ^ (mixed >> 30)) * -0x40A7B892E31B1A47
    mixed = (mixed ^ (mixed >> 27)) * -0x6B2FB644ECCEEE15
    return (mixed ^ (mixed >> 31)) | 1


def weights_problem(file: Path) -> str:
    """The problem of a weights file, or ''. In formats other than safetensors, only empty files and
    Git LFS pointers are detected."""
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
    """The tensors in a safetensors header. Raises ValueError if it claims to exceed the file."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > file.stat().st_size:
            raise ValueError(f"{file}: a header of {length} bytes")
        header = json.loads(stream.read(length))
    return {name: tensor for name, tensor in header.items() if name != "__metadata__"}


def fingerprint(tensors: Mapping[str, torch.Tensor]) -> str:
    """blake2b over names, dtypes, shapes and `bit_sums`, in name order; only the sums come to the
    host."""
    import torch

    names = sorted(tensors)
    digest = hashlib.blake2b(digest_size=16)
    for name in names:
        digest.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}".encode())
    if names:
        sums = torch.cat([bit_sums(tensors[name]) for name in names])
        digest.update(sums.cpu().numpy().tobytes())
    return digest.hexdigest()
