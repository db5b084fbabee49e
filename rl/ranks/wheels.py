"""Makes `transformers`, `diffusers`, `datasets` and `vllm` importable beside a CPU torch.

The index's torchvision, torchaudio and torchcodec wheels are built for CUDA: beside a CPU torch
their C++ libraries do not load (`operator torchvision::nms does not exist`).
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

HIDDEN = ("torchaudio", "torchcodec")
"""Nothing here needs them: built for another torch, they look uninstalled."""
_declared: list[Any] = []
"""The operator library must outlive the process's use of torchvision."""


class _Finder:
    """Finds nothing itself: declares torchvision's operators once Python looks for it."""

    @staticmethod
    def find_spec(name: str, *_: Any) -> None:
        if name != "torchvision" or _declared:
            return
        import torch

        make: Any = torch.library.Library  # it has no types
        library = make("torchvision", "FRAGMENT")
        for operator in ("nms", "qnms"):  # the two that torchvision lacks; they are never called
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _declared.append(library)


def _is_for_cpu(package: str) -> bool:
    """Whether an installed wheel is of torch's CPU index, or the package is not installed."""
    try:
        return version(package).endswith("+cpu")
    except PackageNotFoundError:
        return True


def install() -> None:
    """For the rest of the process; `import rl` does it. Idempotent."""
    if not _is_for_cpu("torch"):
        return
    for package in HIDDEN:
        if not _is_for_cpu(package):
            # `None` makes both `import` and `importlib.util.find_spec` say "not installed".
            sys.modules.setdefault(package, None)  # type: ignore[arg-type]
    if not _is_for_cpu("torchvision") and _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)
