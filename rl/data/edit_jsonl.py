"""Reads image edits from a JSONL file: a line has the pictures' paths and an instruction."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rl.api.data import RowRules
from rl.data.shared.jsonl import LinesSource, read_lines, read_rows
from rl.data.shared.sample_rows import Rows, RowsConfig


class Config(RowsConfig):
    """The keys of a JSONL file of edits."""

    path: str
    """The file; a relative path starts at the working directory."""


class EditJsonl(LinesSource[Config]):
    """The edits of one JSONL file, as samples."""

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
