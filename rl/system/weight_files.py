"""How large a model on disk is, from its files' headers alone.

Called by the plugs' `parameter_counts` for the memory plan.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any


def num_parameters(
    folder: str | Path, is_counted: Callable[[str], bool] = lambda name: True
) -> float:
    """Parameters in the safetensors files of one folder, of the tensors that `is_counted`."""
    headers = map(_header, Path(folder).glob("*.safetensors"))
    return float(
        sum(math.prod(t["shape"]) for h in headers for name, t in h.items() if is_counted(name))
    )


def _header(file: Path) -> dict[str, dict[str, Any]]:
    """The first 8 bytes are the length of a JSON header."""
    with file.open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    return {name: tensor for name, tensor in header.items() if name != "__metadata__"}
