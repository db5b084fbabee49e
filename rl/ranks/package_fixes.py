"""Makes `transformers`, `diffusers`, `datasets` and `vllm` importable with a CPU torch."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

HIDDEN = ("torchaudio", "torchcodec")
"""This project does not need them; wheels built for another torch are made to look uninstalled."""
_declared: list[Any] = []
"""Keeps the operator library alive for as long as the process uses torchvision."""


class _Finder:
    """Finds no module. Declares torchvision's operators when Python first looks for torchvision."""

    @staticmethod
    def find_spec(name: str, *_: Any) -> None:
        if name != "torchvision" or _declared:
            return
        import torch

        make: Any = torch.library.Library  # untyped in torch
        library = make("torchvision", "FRAGMENT")
        for operator in ("nms", "qnms"):  # missing without the C++ library; never called
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _declared.append(library)


def _is_for_cpu(package: str) -> bool:
    """Whether `package` is a wheel from torch's CPU index, or is not installed."""
    try:
        return version(package).endswith("+cpu")
    except PackageNotFoundError:
        return True


def install() -> None:
    """Hide packages and declare operators, process-wide; `import rl` calls this. Idempotent.

    PyPI's wheels of torchvision, torchaudio and torchcodec are built for CUDA. With a CPU torch,
    their C++ libraries do not load (`operator torchvision::nms does not exist`).
    """
    if not _is_for_cpu("torch"):
        return
    for package in HIDDEN:
        if not _is_for_cpu(package):
            # `None` makes both `import` and `importlib.util.find_spec` say "not installed".
            sys.modules.setdefault(package, None)  # type: ignore[arg-type]
    if not _is_for_cpu("torchvision") and _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)
