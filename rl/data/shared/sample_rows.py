"""Turns the rows of a user's data into samples, and reports the bad rows."""

from __future__ import annotations

import json
import unicodedata
from abc import abstractmethod
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rl.api.data import DataSource, RowRules
from rl.api.plugin import ConfigT, FileConfig
from rl.api.types import Sample, UnusableSampleError
from rl.config.schema import Section
from rl.console.progress import counted
from rl.data.shared.sample_pictures import UnusableError, check_header, decode, locate
from rl.text.untrusted import excerpt

PictureCheck = Literal["exists", "header", "pixels"]
MAX_PROBLEMS_SHOWN = 10
MAX_SHOWN = 500
"""Limit of characters of one problem's message: it may quote a path or key of any length."""
MAX_ORIGIN = 40
"""Limit of characters of the rows' origin on a line of progress."""
UsePicture = Callable[[Path | bytes, int], Any]
"""(a picture's path or bytes, largest side in px) -> the decoded picture; None from a check."""
_CHECKS: dict[PictureCheck, UsePicture] = {
    "exists": lambda _located, _max_side_px: None,
    "header": check_header,
    "pixels": decode,
}
_INVISIBLE = {"Cc", "Cf", "Me", "Mn", "Zl", "Zp", "Zs"}
"""Unicode categories of characters that are invisible on their own."""
_BLANK = "\u115f\u1160\u2800\u3164\uffa0"
"""Letters and symbols that are invisible, too."""
_MISSING = object()
SEVERAL = "images"
"""The column of a row's list of source pictures, unless the config names a column."""


class BadRowError(UnusableSampleError):
    """A row that cannot become a sample; the message names file, row and remedy."""


class Columns(Section):
    """Maps each field of a sample to a key of a row. `a.b.0` reaches into nested records and lists.

    Every row must have the keys that the config names, and hidden ones must not be null. `target`,
    `id` and `category` are also read under their default keys from rows that have them. For
    questions with an answer to check: `{ instruction: 'problem', hidden: { answer: 'solution' } }`.
    """

    instruction: str = "instruction"
    """The user's text (edit instruction, question or prompt); every row needs one."""
    source: (
        str | Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)]
    ) = "image"
    """Source picture: a path, or an image cell, or a list of such; '' = rows have none. Of several
    columns (`['first', 'second']`) all but the first may be null, or an empty list. Where
    this key is not set, a row may have a list under 'images' instead of an 'image'."""
    source_optional: bool = False
    """True: a row without a source picture, or with null, is a text-only sample."""
    target: str = "target_image"
    """Reference edit, a picture for rewards only; '' = not read. Name it when a reward needs it."""
    reference: str = ""
    """A correct completion, text; '' = rows have none."""
    id: str = "id"
    """Stable, unique identity; rows without one are called '<file>:<row number>'."""
    category: str = "category"
    """Free label for per-category metrics."""
    hidden: dict[str, str] = {}
    """Name -> column of values that rewards may see and the policy may not (answers, labels)."""
    hidden_optional: bool = False
    """True: a hidden column may hold null in rows where no reward needs it."""

    @model_validator(mode="after")
    def _refuse_hidden_that_policy_reads(self) -> Columns:
        for name, column in self.hidden.items():
            if column in (self.instruction, *self.sources()):
                raise ValueError(
                    f"hidden.{name}: column {column!r} is also what the policy reads; name the "
                    "column that holds the answer alone"
                )
        return self

    def required(self) -> list[str]:
        """The columns every row must have."""
        by_choice = [key for key in ("target", "id", "category") if key in self.model_fields_set]
        sources = () if self.source_optional else self.sources()
        others = (getattr(self, key) for key in ["reference", *by_choice])
        return [*filter(None, [self.instruction, *sources, *others, *self.hidden.values()])]

    def texts(self) -> list[str]:
        """The columns that hold text."""
        texts = (self.instruction, self.reference, self.id, self.category, *self.hidden.values())
        return [*filter(None, texts)]

    def sources(self) -> tuple[str, ...]:
        """The columns of the source pictures."""
        columns = (self.source,) if isinstance(self.source, str) else self.source
        return tuple(filter(None, columns))

    def read_from(self, keys: Container[str]) -> Columns:
        """The columns to read from a row or table with these keys. If the config names no column of
        source pictures and there is no 'image', SEVERAL is read."""
        by_default = "source" not in self.model_fields_set and isinstance(self.source, str)
        if not by_default or SEVERAL not in keys or self.source in keys:
            return self
        return self.model_copy(update={"source": SEVERAL})

    def provides(self) -> frozenset[str]:
        """What every sample has besides its instruction, named as in a reward's `needs`."""
        required = self.required()
        keys = [key for key in ("target", "reference") if getattr(self, key) in required]
        if self.sources() and self.sources()[0] in required:
            keys.append("source")
        return frozenset([*keys, *(f"hidden:{name}" for name in self.hidden)])


def pick(row: Mapping[str, Any], column: str, default: Any = _MISSING) -> Any:
    """The cell at `column`, which may be a dotted path; else `default`; else UnusableError."""
    if column in row:
        return row[column]
    cell: Any = row
    for part in column.split("."):
        if isinstance(cell, Mapping) and part in cell:
            cell = cell[part]
        elif isinstance(cell, list) and part.isdecimal() and int(part) < len(cell):
            cell = cell[int(part)]
        elif default is _MISSING:
            raise UnusableError(
                f"has no {column!r}; it has {', '.join(map(str, row)) or 'nothing'}"
            )
        else:
            return default
    return cell


@dataclass
class Rows:
    """A finite list of rows as samples. Pictures are decoded when a sample is taken."""

    rows: Sequence[Mapping[str, Any]]
    numbers: Sequence[int]
    """The number of each row in `origin`, for messages and default ids."""
    origin: str
    """A file, or data set and split."""
    columns: Columns
    folder: Path
    """Where relative picture paths start."""
    rules: RowRules
    unreadable: Sequence[str] = ()
    """An error message per line that could not be parsed into a row."""
    picture_check: PictureCheck = "header"
    num_skipped: int = 0
    """Rows and lines left out by `keep_good`."""

    def __post_init__(self) -> None:
        self._kept: Sequence[int] = range(len(self.rows))
        # Without the folder: moving the data must not change seeds that derive from ids.
        self._name = self.origin.rsplit("/", 1)[-1]

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: int) -> Sample:
        """Raises BadRowError when the row, or one of its pictures, turns out to be unusable."""
        index, columns = self._kept[index], self.columns
        try:
            row = self.rows[index]
            source = partial(decode, keeps_transparency=self.rules.keeps_transparency)
            sources, target = self._checked(row, source, decode)
        except Exception as error:  # see `problems`
            raise BadRowError(self._error_message(index, error)) from error
        category = pick(row, columns.category, None) if columns.category else None
        return Sample(
            id=self._id(index, row),
            instruction=pick(row, columns.instruction).strip(),
            category=str(category) if category is not None else "",
            reference=pick(row, columns.reference) if columns.reference else None,
            hidden={name: pick(row, column) for name, column in columns.hidden.items()},
            sources=tuple(sources),
            target=target,
        )

    def id_of(self, index: int) -> str:
        """The id of a sample, without opening its pictures."""
        return self._id(self._kept[index], self.rows[self._kept[index]])

    def number_of(self, index: int) -> int:
        """The number of a sample's row in `origin`."""
        return self.numbers[self._kept[index]]

    def keep_good(self) -> None:
        """Check every row; leave the bad ones out and count them, or raise BadRowError."""
        bad = dict(self.problems(self.picture_check))
        messages = [*self.unreadable, *bad.values()]
        if messages and self.rules.on_bad_row == "error":
            raise BadRowError(
                "\n".join(shorten(messages)) + "\nFix these rows, or leave them out with "
                "data.on_bad_row: 'skip'."
            )
        self._kept = [index for index in range(len(self.rows)) if index not in bad]
        self.num_skipped = len(messages)
        if not self._kept:
            raise BadRowError("\n".join([f"{self.origin}: no row is left:", *shorten(messages)]))

    def problems(self, picture_check: PictureCheck) -> Iterator[tuple[int, str]]:
        """(index, error message) of every bad row."""
        check = _CHECKS[picture_check]
        numbers_of: dict[str, int] = {}
        with counted(f"rows of {excerpt(self._name, MAX_ORIGIN)}", len(self.rows)) as progress:
            for index in range(len(self.rows)):
                progress.at(index)
                try:
                    row = self.rows[index]
                    self._checked(row, check, check)
                    identity = self._id(index, row)
                    # Different sequences of characters may look the same.
                    key = unicodedata.normalize("NFC", identity)
                    first = numbers_of.setdefault(key, self.numbers[index])
                    if first != self.numbers[index]:
                        raise UnusableError(f"id {identity!r} is already that of row {first}")
                # A cell may hold anything, and whatever it raises is the row's fault: pyarrow's
                # UnicodeDecodeError, RecursionError, ValueError for a number without end, ...
                except Exception as error:
                    yield index, self._error_message(index, error)

    def _checked(
        self, row: Mapping[str, Any], use_source: UsePicture, use_target: UsePicture
    ) -> tuple[list[Any], Any]:
        """(results of `use_source` on the row's source pictures, result of `use_target` on its
        reference edit or None without one). Raises an exception for a bad row."""
        columns = _read_from(self.columns, row)
        _check_text(row, columns)
        cells = _source_cells(row, columns)
        max_pictures = self.rules.max_pictures
        if max_pictures is not None and len(cells) > max_pictures:
            raise UnusableError(
                f"has {len(cells)} source pictures, but this run accepts {max_pictures or 'none'}; "
                f"{self.rules.pictures_remedy}"
            )

        def use_cell(label: str, column: str, cell: Any, use: UsePicture) -> Any:
            try:
                return use(locate(cell, self.folder), self.rules.max_image_side_px)
            except UnusableError as error:
                raise UnusableError(f"{label} ({column!r}): {error}") from error

        sources = []
        for number, (column, cell) in enumerate(cells, 1):
            label = "source picture" if len(cells) == 1 else f"source picture {number}"
            sources.append(use_cell(label, column, cell, use_source))
        target = pick(row, columns.target, None) if columns.target else None
        if target is None and columns.target not in columns.required():
            return sources, None
        return sources, use_cell("target picture", columns.target, target, use_target)

    def most_pictures(self) -> int:
        """Largest number of source pictures in a row; no picture is opened."""
        most = 0
        for row in self.rows:
            with suppress(Exception):  # a bad row: see `problems`
                most = max(most, len(_source_cells(row, _read_from(self.columns, row))))
        return most

    def _error_message(self, index: int, error: Exception) -> str:
        is_known = isinstance(error, UnusableError)
        message = str(error) if is_known else f"cannot be read ({type(error).__name__}: {error})"
        return f"{self.origin}, row {self.numbers[index]}: {excerpt(message, MAX_SHOWN)}"

    def _id(self, index: int, row: Mapping[str, Any]) -> str:
        identity = pick(row, self.columns.id, None) if self.columns.id else None
        return f"{self._name}:{self.numbers[index]}" if identity is None else str(identity)


def shorten(problems: Sequence[str]) -> list[str]:
    """The first problems, and a line with the number of the others."""
    more = len(problems) - MAX_PROBLEMS_SHOWN
    tail = [f"... and {more} more bad rows"] if more > 0 else []
    return [*problems[:MAX_PROBLEMS_SHOWN], *tail]


def _read_from(columns: Columns, row: Mapping[str, Any]) -> Columns:
    """The columns to read from `row`. Raises UnusableError if both default ones hold pictures."""
    filled = {key for key in (SEVERAL, *columns.sources()) if row.get(key) not in (None, [])}
    if SEVERAL in filled and len(filled) > 1 and columns.read_from({SEVERAL}) is not columns:
        raise UnusableError(
            f"has both {columns.source!r} and {SEVERAL!r}; keep one of them, or name the one that "
            "is meant in the source's `columns`"
        )
    return columns.read_from(filled or row)


def _source_cells(row: Mapping[str, Any], columns: Columns) -> list[tuple[str, Any]]:
    """(column, cell) of each source picture of a row, in order."""
    cells: list[tuple[str, Any]] = []
    for number, column in enumerate(columns.sources()):
        cell = pick(row, column, None)
        if cell is None and (number or columns.source_optional):
            continue
        if isinstance(cell, list) and (cell or number or columns.source_optional):
            cells += [(column, item) for item in cell]
        else:
            cells.append((column, cell))
    first = columns.sources()[:1]
    if cells and first and not any(column == first[0] for column, _ in cells):
        raise UnusableError(
            f"{first[0]!r} holds no picture, but {cells[0][0]!r} does, and would be the first: "
            "fill the columns of columns.source in their order"
        )
    return cells


def _check_text(row: Mapping[str, Any], columns: Columns) -> None:
    for column in columns.required():
        pick(row, column)
    for name, column in columns.hidden.items():
        if pick(row, column) is None and not columns.hidden_optional:
            raise UnusableError(f"hidden.{name}: {column!r} is null; write what rewards may see")
    for column in filter(None, (columns.instruction, columns.reference)):
        text = pick(row, column)
        if not isinstance(text, str):
            raise UnusableError(f"{column!r} is {text!r:.60}, not text; put it in quotes")
        if all(unicodedata.category(c) in _INVISIBLE or c in _BLANK for c in text):
            raise UnusableError(f"{column!r} is empty; write what is wanted")
    for column in columns.texts():
        try:
            # Nested text too.
            json.dumps(pick(row, column, None), ensure_ascii=False, default=str).encode()
        except UnicodeEncodeError as error:
            raise UnusableError(
                f"{column!r} holds half a character (a lone surrogate), which no text has; fix it"
            ) from error


class RowsConfig(FileConfig):
    """The keys of a source of rows: columns, and how pictures are found and checked."""

    columns: Columns = Columns()
    """Maps each field of a sample to a key or column of a row."""
    image_folder: str = ""
    """Where relative picture paths start; '' = the file's own folder."""
    picture_check: PictureCheck = "header"
    """How far every picture is read at start. exists: not at all; header: format and size, about
    0.3 ms each; pixels: decoded, about 50 ms per megapixel, which alone finds truncated files."""


class RowsSource(DataSource[ConfigT]):
    """A `DataSource` over the rows that `read` returns."""

    reads_much = True

    def __init__(self, config: ConfigT, rules: RowRules) -> None:
        """Raises BadRowError (a ValueError) naming file and rows."""
        super().__init__(config, rules)
        self._rows = self.read(config, rules)
        self._rows.keep_good()
        self.num_skipped = self._rows.num_skipped

    @classmethod
    @abstractmethod
    def read(cls, config: ConfigT, rules: RowRules) -> Rows:
        """All rows, including bad ones."""

    @classmethod
    def provides(cls, config: ConfigT) -> frozenset[str]:
        return config.columns.provides() if isinstance(config, RowsConfig) else frozenset()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Sample:
        return self._rows[index]
