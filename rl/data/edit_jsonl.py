"""Reads image edits from a JSONL file: a picture's path and an instruction per line.

{"image": "photos/pagoda.jpg", "instruction": "make it dusk", "id": "p-1", "category": "light"}
{"images": ["room.jpg", "lamp.jpg"], "instruction": "put the lamp of picture 2 into picture 1"}
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rl.api.data import RowRules
from rl.data.shared.jsonl import LinesSource, read_lines, read_rows
from rl.data.shared.sample_rows import Rows, RowsConfig


class Config(RowsConfig):
    """One JSONL file."""

    path: str
    """The file; a relative path counts from the working directory."""


class EditJsonl(LinesSource[Config]):
    """One file as samples."""

    @classmethod
    def files(cls, config: Config) -> Sequence[Path]:
        return [Path(config.path)]

    @classmethod
    def read(cls, config: Config, rules: RowRules) -> Rows:
        path = Path(config.path)
        objects, numbers, unreadable = read_rows(read_lines(path), str(path))
        folder = Path(config.image_folder) if config.image_folder else path.parent
        check = config.picture_check
        return Rows(objects, numbers, str(path), config.columns, folder, rules, unreadable, check)
