"""Image edits in a JSONL file: one object per line with a picture's path and an instruction.

    {"image": "photos/pagoda.jpg", "instruction": "make it dusk", "id": "p-1", "category": "light"}

Plug of `rl/data`. What: the file's config, and checking it. What not: its lines
(`shared/jsonl.py`), its pictures and columns (`shared/rows.py`).
"""

from __future__ import annotations

from pathlib import Path

from rl.api.data import RowRules
from rl.api.plug import FileConfig
from rl.data.shared.jsonl import count_lines, read_jsonl, row_problems
from rl.data.shared.rows import BadRowError, Columns, PictureCheck, Rows, RowsSource


class Config(FileConfig):
    """One JSONL file."""

    path: str
    """The file; a relative path counts from the working directory."""
    image_folder: str = ""
    """Where relative picture paths count from; '' = the file's own folder."""
    columns: Columns = Columns()
    """Which key of a line is what."""
    picture_check: PictureCheck = "header"
    """How far every picture is read at start. exists: not at all; header: format and size, about
    0.3 ms each; pixels: decoded, about 50 ms per megapixel, which alone finds truncated files."""


class EditJsonl(RowsSource[Config]):
    """One file as samples."""

    def __init__(self, config: Config, rules: RowRules) -> None:
        """Raises BadRowError (a ValueError) naming file and rows."""
        rows, unreadable = read(config, rules.max_image_side_px)
        rows.keep_good(rules.on_bad_row, config.picture_check, unreadable)
        super().__init__(rows)

    @classmethod
    def provides(cls, config: Config) -> frozenset[str]:
        """What this config's samples carry, in the words of a reward's `needs`."""
        return config.columns.provides()

    @classmethod
    def count(cls, config: Config) -> int | None:
        """Rows in the file, bad ones included; None when there is no file or nothing in it."""
        return count_lines(Path(config.path))

    @classmethod
    def problems(cls, config: Config, rules: RowRules) -> list[str]:
        """Everything that is wrong with the file, without opening a picture."""
        try:
            rows, unreadable = read(config, rules.max_image_side_px)
        except BadRowError as error:
            return [str(error)]
        return row_problems(rows, unreadable, rules.on_bad_row, config.path)


def read(config: Config, max_image_side_px: int) -> tuple[Rows, list[str]]:
    """The lines that are JSON objects, and a sentence for each that is not."""
    path = Path(config.path)
    objects, numbers, unreadable = read_jsonl(path)
    folder = Path(config.image_folder) if config.image_folder else path.parent
    rows = Rows(objects, numbers, str(path), config.columns, folder, max_image_side_px)
    return rows, unreadable
