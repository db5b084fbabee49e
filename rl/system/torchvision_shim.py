"""Make `import torchvision` work on a box whose torch and torchvision wheels do not match.

What: the package index's torchvision wheel is built for CUDA; beside a CPU torch its C++ library does
not load, and then `transformers`, `diffusers` and `vllm` cannot be imported (`operator
torchvision::nms does not exist`). Two operator schemas are all that is missing: declaring them makes
the Python half importable, and nobody here calls the operators. What not: a working torchvision is
left alone, and an absent one stays absent. Called by every plug, before its first import of those
three packages.
"""

from __future__ import annotations

import sys
from typing import Any, Literal

_declared: list[Any] = []
"""The library object must outlive the process's use of torchvision."""


def ensure_torchvision() -> Literal["native", "shimmed", "absent"]:
    """Import torchvision, declaring its two operators where its own library does not load.

    The import is tried first: declaring before a working library loads would register twice.
    """
    try:
        import torchvision  # noqa: F401
    except ImportError:
        return "absent"
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
    else:
        return "shimmed" if _declared else "native"
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _declared.append(library)
    import torchvision  # noqa: F401

    return "shimmed"
