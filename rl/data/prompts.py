"""Users' prompts for pictures: a built-in set of challenging ones, or a file of your own.

    data: { train: [{ type: 'prompts' }], validation: [{ type: 'prompts', split: 'held_out' }] }

Plug of `rl/data`. The built-in set has 256 prompts in eight categories of 32 (unusual colours,
impossible objects, abstract concepts, materials, compositions, counts, scales, unlikely acts), of
which the last 8 of each are held out for good. What not: a column of a hub data set, which
`hf_dataset` reads with `columns: { instruction: 'caption', source: '' }`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import model_validator

from rl.api.data import RowRules
from rl.api.plug import FileConfig
from rl.data.shared.jsonl import read_jsonl, read_lines, row_problems
from rl.data.shared.rows import BadRowError, Columns, Rows, RowsSource

BUILT_IN = Path(__file__).parent / "prompts"
"""One JSONL file per split, categories in turn, so that any beginning of one is balanced."""


class Config(FileConfig):
    """The built-in prompts, or one file of them."""

    path: str = ""
    """A .txt file with a prompt per line, or a .jsonl file with an object per line; relative paths
    count from the working directory. '' = the built-in set."""
    split: Literal["train", "held_out", "all"] = "train"
    """Of the built-in set: 192 prompts, the other 64, or all. A file is taken whole."""
    prompt_key: str = "prompt"
    """Of a .jsonl file: what holds the prompt; 'id' and 'category' are read where there are any."""
    picture_key: str = ""
    """Of a .jsonl file: what holds the path of a picture that goes with the prompt, from the file's
    own folder; rows without one are text alone. '' = no row has one."""

    @model_validator(mode="after")
    def _keys_that_are_read(self) -> Config:
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

    def __init__(self, config: Config, rules: RowRules) -> None:
        """Raises BadRowError (a ValueError) naming file and rows."""
        rows, unreadable = _read(config, rules.max_image_side_px)
        rows.keep_good(rules.on_bad_row, "header", unreadable)
        super().__init__(rows)

    @classmethod
    def provides(cls, config: Config) -> frozenset[str]:
        """Nothing that every sample has beyond its prompt."""
        return frozenset()

    @classmethod
    def count(cls, config: Config) -> int | None:
        """Prompts, bad rows included; None when there is no file or nothing in it."""
        try:
            return sum(len(read_lines(file)) for file in _files(config))
        except BadRowError:
            return None

    @classmethod
    def problems(cls, config: Config, rules: RowRules) -> list[str]:
        """Everything that is wrong with the file, without opening a picture."""
        try:
            rows, unreadable = _read(config, rules.max_image_side_px)
        except BadRowError as error:
            return [str(error)]
        return row_problems(rows, unreadable, rules.on_bad_row, config.path)


def _files(config: Config) -> list[Path]:
    if config.path:
        return [Path(config.path)]
    splits = ("train", "held_out") if config.split == "all" else (config.split,)
    return [BUILT_IN / f"{split}.jsonl" for split in splits]


def _read(config: Config, max_image_side_px: int) -> tuple[Rows, list[str]]:
    """The rows, and a sentence for each line that is none."""
    objects: list[dict[str, Any]] = []
    numbers: list[int] = []
    unreadable: list[str] = []
    for file in _files(config):
        is_text = file.suffix == ".txt"
        found = prompts_of(read_lines(file), str(file)) if is_text else read_jsonl(file)
        objects += found[0]
        numbers += found[1]
        unreadable += found[2]
    columns = Columns(
        instruction=config.prompt_key, source=config.picture_key, source_optional=True
    )
    origin = config.path or f"prompts[{config.split}]"
    folder = Path(config.path).parent
    return Rows(objects, numbers, origin, columns, folder, max_image_side_px), unreadable


def prompts_of(
    lines: Sequence[tuple[int, bytes]], origin: str
) -> tuple[list[dict[str, Any]], list[int], list[str]]:
    """Lines of text as what `read_jsonl` gives: rows, their numbers, a sentence for each that is
    none. `origin` is where they are from, for the sentence."""
    objects: list[dict[str, Any]] = []
    numbers: list[int] = []
    unreadable: list[str] = []
    for number, line in lines:
        try:
            objects.append({"prompt": line.decode("utf-8")})
            numbers.append(number)
        except UnicodeDecodeError:
            unreadable.append(f"{origin}, row {number}: is not UTF-8; save the file as UTF-8")
    return objects, numbers, unreadable
