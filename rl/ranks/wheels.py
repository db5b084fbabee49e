"""Makes `transformers`, `diffusers`, `datasets` and `vllm` importable beside a CPU torch.

The package index's torchvision, torchaudio and torchcodec wheels are built for CUDA. Beside a CPU
torch their C++ libraries do not load, and everything that imports them fails (`operator
torchvision::nms does not exist`, `Could not load this library`). A wheel that works is left alone.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

HIDDEN = ("torchaudio", "torchcodec")
"""Nothing here needs them: where they do not load, they look uninstalled."""
ASKING = ("transformers", "diffusers", "datasets", "vllm")
"""Packages that note at import what is installed, and trust it later."""
_declared: list[Any] = []
"""The operator library must outlive the process's use of torchvision."""


class _Finder:
    """Finds those packages as Python does, and puts `_load` around their loading."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in ("torchvision", *HIDDEN, *ASKING):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module
            spec.loader.exec_module = lambda module: _load(load, module)  # type: ignore[method-assign]
        return spec


def _load(load: Any, module: ModuleType) -> None:
    name = module.__name__
    if name in ASKING:
        _hide_broken()
    try:
        load(module)
    except (OSError, RuntimeError) as error:
        if name in HIDDEN:
            raise ImportError(f"{name} does not load beside this torch: {error}") from error
        if name != "torchvision" or "torchvision::" not in str(error):
            raise
        for part in [part for part in sys.modules if part.startswith("torchvision.")]:
            del sys.modules[part]
        # Only now: were a working library to load after this, it would register them twice.
        _declare_operators()
        load(module)


def _hide_broken() -> None:
    for package in HIDDEN:
        try:
            import_module(package)
        except ImportError:
            # `None` makes both `import` and `importlib.util.find_spec` say "not installed".
            sys.modules[package] = None  # type: ignore[assignment]


def _declare_operators() -> None:
    """Schemas of the two operators that torchvision lacks; they are never called."""
    import torch

    make: Any = torch.library.Library  # it has no types
    library = make("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _declared.append(library)


def install() -> None:
    """For the rest of the process; `import rl` does it. Idempotent."""
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)
        if not sys.modules.keys().isdisjoint(ASKING):  # a notebook that imported them first
            _hide_broken()
