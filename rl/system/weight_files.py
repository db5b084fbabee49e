"""How large a model on disk is, from its files' headers alone.

Called by the plugs' `parameter_counts` for the memory plan.
"""

from __future__ import annotations

import json
import math
from pathlib import Path


def num_parameters(folder: str | Path) -> float:
    """Parameters in the safetensors files of one folder."""
    return float(sum(map(_count_in_header, Path(folder).glob("*.safetensors"))))


def _count_in_header(file: Path) -> int:
    """The first 8 bytes are the length of a JSON header."""
    with file.open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    return sum(math.prod(t["shape"]) for name, t in header.items() if name != "__metadata__")
