"""Writes edits of coloured shapes as a user's own data: pictures and a JSONL file.

`python -m tiny_world.data.write_shapes edits 1024` writes `edits/edits.jsonl` and 1024 pictures.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rl.api.data import RowRules
from tiny_world.data.shapes import Shapes
from tiny_world.data.synthetic import SyntheticConfig


def write(folder: Path, num_samples: int, seed: int = 1) -> Path:
    """Write the samples of that `SyntheticConfig`; returns the JSONL file."""
    folder.mkdir(parents=True, exist_ok=True)
    shapes = Shapes(SyntheticConfig(num_samples=num_samples, seed=seed), RowRules())
    rows = []
    for sample in map(shapes.make, range(num_samples)):
        sample.sources[0].save(folder / f"{sample.id}.png")
        rows.append({"image": f"{sample.id}.png", "instruction": sample.instruction})
    file = folder / "edits.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


if __name__ == "__main__":
    write(Path(sys.argv[1]), int(sys.argv[2]))
