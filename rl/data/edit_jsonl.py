"""Reads image edits from a JSONL file: a line has the pictures' paths and an instruction."""

from __future__ import annotations

from pathlib import Path

from rl.api.data import RowRules
from rl.data.rows import Lines, Rows, RowsConfig, RowsSource


class Config(RowsConfig):
    """The keys of a JSONL file of edits."""

    path: str
    """The file; a relative path starts at the working directory."""


class EditJsonl(RowsSource[Config]):
    """The edits of one JSONL file, as samples."""

    @classmethod
    def read(cls, config: Config, rules: RowRules) -> Rows:
        path = Path(config.path)
        lines = Lines([path])
        return Rows(
            lines,
            lines.numbers,
            str(path),
            config.columns,
            Path(config.image_folder) if config.image_folder else path.parent,
            rules,
            config.picture_check,
            version=lines.version,
        )
