"""Make `transformers`, `diffusers` and `vllm` importable beside a CPU torch.

The package index's torchvision, torchaudio and torchcodec wheels are built for CUDA. Beside a CPU
torch their C++ libraries do not load, and everything that imports them falls over (`operator
torchvision::nms does not exist`, `Could not load this library`). Torchvision lacks two operator
schemas, which are declared here and never called; the other two, used by nobody here, are hidden as
if they were not installed. A wheel that works is left alone.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

_declared: list[Any] = []
"""The operator library must outlive the process's use of torchvision."""


def mend_mismatched_wheels() -> None:
    """Idempotent; imports torch, and those three where they are installed."""
    _mend_torchvision()
    _hide_if_broken("torchaudio")
    _hide_if_broken("torchcodec")


def _mend_torchvision() -> None:
    # The import is tried first: declaring the operators while a working library can still load
    # would register them twice.
    try:
        import torchvision
    except ImportError:
        return
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
    else:
        return
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _declared.append(library)
    import torchvision  # noqa: F401


def _hide_if_broken(package: str) -> None:
    if package in sys.modules:
        return
    try:
        importlib.import_module(package)
    except ImportError:
        return
    except (OSError, RuntimeError):
        for name in [name for name in sys.modules if name.split(".")[0] == package]:
            del sys.modules[name]
        # `None` makes both `import` and `importlib.util.find_spec` say "not installed".
        sys.modules[package] = None  # type: ignore[assignment]
