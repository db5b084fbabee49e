"""Reads users' prompts for pictures: the built-in 256, or a file of your own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import model_validator

from rl.api.data import RowRules
from rl.api.plugin import FileConfig
from rl.data.rows import Columns, Lines, Rows, RowsSource

BUILT_IN = Path(__file__).parent / "prompts"
"""Has one JSONL file per split. Of the 32 prompts of each of eight categories, the last 8 are held
out. Categories alternate in a file, so that the first n lines are balanced."""


class Config(FileConfig):
    """The built-in prompts, or a file of prompts."""

    path: str = ""
    """A .txt file with a prompt per line, or a .jsonl file with an object per line; relative paths
    start at the working directory. '' = the built-in set."""
    split: Literal["train", "held_out", "all"] = "train"
    """Part of the built-in set: 192 prompts, the other 64, or all. A user's file is not split."""
    prompt_key: str = "prompt"
    """For a .jsonl file: the key of the prompt; keys 'id' and 'category' are read if present."""
    picture_key: str = ""
    """For a .jsonl file: the key of the path to the prompt's picture, relative to the file's own
    folder; rows without it are text only. '' = no row has a picture."""

    @model_validator(mode="after")
    def _refuse_unread_keys(self) -> Config:
        if self.path and "split" in self.model_fields_set:
            raise ValueError(
                "split: only the built-in set is split; give training and held-out prompts in two "
                "files"
            )
        if not self.path.endswith(".jsonl"):
            for key in ("prompt_key", "picture_key"):
                if key in self.model_fields_set:
                    raise ValueError(f"{key}: only a .jsonl file has keys")
        if self.path and not self.path.endswith((".jsonl", ".txt")):
            raise ValueError(f"path: {self.path!r} is neither .txt nor .jsonl")
        return self


class Prompts(RowsSource[Config]):
    """The prompts as samples."""

    @classmethod
    def files(cls, config: Config) -> Sequence[Path]:
        """The user's file, or the files of the built-in set."""
        if config.path:
            return [Path(config.path)]
        splits = ("train", "held_out") if config.split == "all" else (config.split,)
        return [BUILT_IN / f"{split}.jsonl" for split in splits]

    @classmethod
    def read(cls, config: Config, rules: RowRules) -> Rows:
        parse = (lambda line: {"prompt": line}) if config.path.endswith(".txt") else None
        lines = Lines(cls.files(config), parse)
        columns = Columns(
            instruction=config.prompt_key, source=config.picture_key, source_optional=True
        )
        origin = config.path or f"prompts[{config.split}]"
        folder = Path(config.path).parent
        return Rows(lines, lines.numbers, origin, columns, folder, rules, version=lines.version)
