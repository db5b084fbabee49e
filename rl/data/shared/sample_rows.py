"""Turns the rows of a user's data into samples, and reports the bad rows."""

from __future__ import annotations

import json
import unicodedata
from abc import abstractmethod
from array import array
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from rl.api.data import DataSource, Findings, RowRules
from rl.api.plugin import ConfigT, FileConfig
from rl.api.types import Sample, UnusableSampleError
from rl.config.schema import Section
from rl.data.shared.sample_pictures import UnusableError, check_header, decode, locate
from rl.printing import excerpt
from rl.progress import counted

if TYPE_CHECKING:
    from PIL import Image

PictureCheck = Literal["exists", "header", "pixels"]
MAX_PROBLEMS_SHOWN = 10
MAX_SHOWN = 500
"""Limit of characters of one problem's message: it may quote a path or key of any length."""
MAX_ORIGIN = 40
"""Limit of characters of the rows' origin on a line of progress."""
MAX_COLUMNS_SHOWN = 120
KEPT_SIZES = 2**16
"""Pictures whose size is remembered during a check: many rows may show the same one."""
UsePicture = Callable[[Any], Any]
"""A row's cell -> the decoded picture or, in a check, its size."""
_INVISIBLE = {"Cc", "Cf", "Me", "Mn", "Zl", "Zp", "Zs"}
"""Unicode categories of characters that are invisible on their own."""
_BLANK = "\u115f\u1160\u2800\u3164\uffa0"
"""Letters and symbols that are invisible, too."""
_MISSING = object()
SEVERAL = "images"
"""The column of a row's list of source pictures, unless the config names a column."""


class BadRowError(UnusableSampleError):
    """A row that cannot become a sample; the message names file, row and remedy."""


class RowCheckError(ValueError):
    """The policy cannot check any row; the message is that of its own error."""


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


class _Plan:
    """The columns to read from one kind of row."""

    def __init__(self, columns: Columns) -> None:
        self.columns = columns
        self.required, self.texts, self.sources = (
            columns.required(),
            columns.texts(),
            columns.sources(),
        )


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
    """May raise any error for a row that cannot be read."""
    numbers: Sequence[int]
    """The number of each row in `origin`, from 1, for messages."""
    origin: str
    """A file, or data set and split."""
    columns: Columns
    folder: Path
    """Where relative picture paths start."""
    rules: RowRules
    picture_check: PictureCheck = "header"
    id_numbers: Sequence[int] | None = None
    """The number of each row in its default id; None: `numbers`."""
    version: str = ""
    """A hash of what was read."""
    keys: set[str] = field(default_factory=set)
    """The columns of a table; for other rows, the keys that `check` has met."""
    bad: array[int] = field(default_factory=lambda: array("Q"))
    """Indices of the unusable rows."""
    left_out: list[str] = field(default_factory=list)
    """Why the first bad rows are bad; set by `check`."""
    warnings: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    most_pictures: int = 1
    contents: array[int] = field(default_factory=lambda: array("q"))
    """A hash of each good row's instruction and source pictures; set by `check`."""

    def __post_init__(self) -> None:
        self._kept: Sequence[int] = range(len(self.rows))
        # Without the folder: moving the data must not change seeds that derive from ids.
        self._name = self.origin.rsplit("/", 1)[-1]
        self._plan = _Plan(self.columns)
        self._several = _Plan(self.columns.read_from({SEVERAL}))
        self._look = lru_cache(KEPT_SIZES)(self._size_of)
        self._num_opened = self._num_unopened = 0

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: int) -> Sample:
        """Raises BadRowError when the row, or one of its pictures, turns out to be unusable."""
        index, columns = self._kept[index], self.columns
        try:
            row = self.rows[index]
            _, sources, target = self._checked(
                row,
                partial(self._decoded, keeps_transparency=self.rules.keeps_transparency),
                self._decoded,
            )
        except Exception as error:  # see `check`
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
        """The number of a sample's row in its default id."""
        return (self.id_numbers or self.numbers)[self._kept[index]]

    def leave_out(self, bad: Iterable[int]) -> None:
        """Leave out the rows with these indices. Raises BadRowError if none is left."""
        self.bad = array("Q", bad)
        if self.bad:
            left_out = set(self.bad)
            self._kept = array("Q", (i for i in range(len(self.rows)) if i not in left_out))
        if not self._kept:
            raise BadRowError(f"{self.origin}: no row is left")

    def check(self) -> None:
        """Check every row; leave the bad ones out, or raise BadRowError. Fills `contents`,
        `warnings` and `unread`."""
        bad, messages, num_uncounted = array("Q"), [], 0
        ids, id_rows, known_ids = array("q"), array("Q"), set()
        with counted(f"rows of {excerpt(self._name, MAX_ORIGIN)}", len(self.rows)) as progress:
            for index in range(len(self.rows)):
                if index % 64 == 0:
                    progress.at(index)
                try:
                    row = self.rows[index]
                    if not row.keys() <= self.keys:
                        self.keys.update(row)
                    cells, sizes, _ = self._checked(row, self._looked_at, self._looked_at)
                    identity = self._id(index, row)
                    # Different sequences of characters may look the same.
                    key = hash(unicodedata.normalize("NFC", identity))
                    if key in known_ids:
                        # The search is slow in a long file: only for messages that are shown.
                        is_shown = len(bad) < MAX_PROBLEMS_SHOWN
                        first = self.numbers[id_rows[ids.index(key)]] if is_shown else "?"
                        raise UnusableError(f"id {identity!r} is already that of row {first}")
                    instruction = pick(row, self.columns.instruction).strip()
                    num_uncounted += not self._fits(identity, instruction, sizes)
                    content = hash((instruction, *map(_content_of, cells)))
                # A cell may hold anything, and whatever it raises is the row's fault: pyarrow's
                # UnicodeDecodeError, RecursionError, ValueError for a number without end, ...
                except RowCheckError:
                    raise
                except Exception as error:
                    if len(bad) < MAX_PROBLEMS_SHOWN:
                        messages.append(self._error_message(index, error))
                    bad.append(index)
                else:
                    self.most_pictures = max(self.most_pictures, len(cells))
                    known_ids.add(key)
                    ids.append(key)
                    id_rows.append(index)
                    self.contents.append(content)
        self.left_out = shorten(messages, len(bad))
        listed = "\n".join(self.left_out)
        if bad and self.rules.on_bad_row == "error":
            raise BadRowError(
                f"{listed}\nFix these rows, or leave them out with data.on_bad_row: 'skip'."
            )
        try:
            self.leave_out(bad)
        except BadRowError as error:
            raise BadRowError(f"{error}:\n{listed}") from None
        self._look_back(num_uncounted)

    def _fits(self, identity: str, instruction: str, sizes: Sequence[Any]) -> bool:
        """Whether its prompt is known to be possible. Raises RowCheckError for an error of the
        policy's check itself."""
        try:
            check = self.rules.check
            return check is None or check(identity, instruction, sizes, None)
        except UnusableSampleError:
            raise
        except Exception as error:
            raise RowCheckError(str(error) or type(error).__name__) from error

    def _look_back(self, num_uncounted: int) -> None:
        """Fill `warnings` and `unread`. `num_uncounted`: prompts of unknown length."""
        num_rows, num_distinct = len(self._kept), len(set(self.contents))
        if num_rows > 1 and num_distinct * 2 <= num_rows:
            self.warnings.append(
                f"only {num_distinct} of {num_rows} rows differ in instruction or source picture"
            )
        columns = self.columns
        read = {*self._plan.texts, *self._plan.sources, *self._several.sources, columns.target}
        others = sorted(self.keys - {column.split(".")[0] for column in read} - read)
        for optional in ("target", "id", "category"):
            column = getattr(columns, optional)
            if column and column not in self.keys and column not in columns.required():
                for similar in get_close_matches(column, others, n=1):
                    self.warnings.append(
                        f"no row has {column!r}, and nothing reads {similar!r}: if that is meant, "
                        f"set columns.{optional} to it"
                    )
        if others:
            self.unread.append(f"columns {excerpt(', '.join(others), MAX_COLUMNS_SHOWN)}")
        if self._num_unopened:
            self.unread.append(f"{self._num_unopened} pictures, which exist")
        if num_uncounted:
            self.unread.append(
                f"tokens of {num_uncounted} prompts, whose pictures or tokenizer are not here"
            )

    def _checked(
        self, row: Mapping[str, Any], use_source: UsePicture, use_target: UsePicture
    ) -> tuple[list[Any], list[Any], Any]:
        """(cells of the row's source pictures, results of `use_source` on them, result of
        `use_target` on its reference edit or None without one). Raises an exception for a bad
        row."""
        plan = self._plan_of(row)
        columns = plan.columns
        _check_text(row, plan)
        cells = _source_cells(row, plan)
        max_pictures = self.rules.max_pictures
        if max_pictures is not None and len(cells) > max_pictures:
            raise UnusableError(
                f"has {len(cells)} source pictures, but this run accepts {max_pictures or 'none'}; "
                f"{self.rules.pictures_remedy}"
            )

        sources: list[Any] = []
        target = pick(row, columns.target, None) if columns.target else None
        has_target = target is not None or columns.target in plan.required
        place = ""
        try:
            for number, (column, cell) in enumerate(cells, 1):
                label = "source picture" if len(cells) == 1 else f"source picture {number}"
                place = f"{label} ({column!r})"
                sources.append(use_source(cell))
            place = f"target picture ({columns.target!r})"
            target = use_target(target) if has_target else None
        except UnusableError as error:
            raise UnusableError(f"{place}: {error}") from error
        return [cell for _, cell in cells], sources, target

    def _plan_of(self, row: Mapping[str, Any]) -> _Plan:
        """The columns to read from `row`. Raises UnusableError if both default ones hold
        pictures."""
        if SEVERAL not in row or self._several.columns is self.columns:
            return self._plan
        filled = {key for key in (SEVERAL, *self._plan.sources) if row.get(key) not in (None, [])}
        if SEVERAL in filled and len(filled) > 1:
            raise UnusableError(
                f"has both {self.columns.source!r} and {SEVERAL!r}; keep one of them, or name the "
                "one that is meant in the source's `columns`"
            )
        is_several = self.columns.read_from(filled or row) is not self.columns
        return self._several if is_several else self._plan

    def _decoded(self, cell: Any, keeps_transparency: bool = False) -> Image.Image:
        located = locate(cell, self.folder)
        return decode(located, self.rules.max_image_side_px, keeps_transparency)

    def _looked_at(self, cell: Any) -> tuple[int, int] | None:
        """(width, height) of a picture, px; None if it was not opened."""
        return self._look(cell) if isinstance(cell, str) else self._size_of(cell)

    def _size_of(self, cell: Any) -> tuple[int, int] | None:
        located, opens = locate(cell, self.folder), self.rules.opens
        is_enough = opens is not None and self._num_opened >= opens
        if self.picture_check == "exists" or is_enough:
            self._num_unopened += 1
            return None
        self._num_opened += 1
        if self.picture_check == "pixels":
            return decode(located, self.rules.max_image_side_px).size
        return check_header(located, self.rules.max_image_side_px)

    def _error_message(self, index: int, error: Exception) -> str:
        is_known = isinstance(error, UnusableError | UnusableSampleError)
        message = str(error) if is_known else f"cannot be read ({type(error).__name__}: {error})"
        return f"{self.origin}, row {self.numbers[index]}: {excerpt(message, MAX_SHOWN)}"

    def _id(self, index: int, row: Mapping[str, Any]) -> str:
        identity = pick(row, self.columns.id, None) if self.columns.id else None
        if identity is not None:
            return str(identity)
        return f"{self._name}:{(self.id_numbers or self.numbers)[index]}"


def shorten(problems: Sequence[str], num: int) -> list[str]:
    """The first of `num` problems, and a line with the number of the others."""
    more = num - MAX_PROBLEMS_SHOWN
    tail = [f"... and {more} more bad rows"] if more > 0 else []
    return [*problems[:MAX_PROBLEMS_SHOWN], *tail]


def _content_of(cell: Any) -> Any:
    """What a cell's picture is read from, hashable."""
    is_plain = isinstance(cell, str) or not isinstance(cell, Mapping)
    return cell if is_plain else cell.get("bytes") or cell.get("path")


def _source_cells(row: Mapping[str, Any], plan: _Plan) -> list[tuple[str, Any]]:
    """(column, cell) of each source picture of a row, in order."""
    columns = plan.columns
    if len(plan.sources) == 1 and isinstance(cell := row.get(plan.sources[0]), str):
        return [(plan.sources[0], cell)]  # nearly every row
    cells: list[tuple[str, Any]] = []
    for number, column in enumerate(plan.sources):
        cell = pick(row, column, None)
        if cell is None and (number or columns.source_optional):
            continue
        if isinstance(cell, list) and (cell or number or columns.source_optional):
            cells += [(column, item) for item in cell]
        else:
            cells.append((column, cell))
    first = plan.sources[:1]
    if cells and first and not any(column == first[0] for column, _ in cells):
        raise UnusableError(
            f"{first[0]!r} holds no picture, but {cells[0][0]!r} does, and would be the first: "
            "fill the columns of columns.source in their order"
        )
    return cells


def _check_text(row: Mapping[str, Any], plan: _Plan) -> None:
    columns = plan.columns
    for column in plan.required:
        if column not in row:
            pick(row, column)  # nested, or an error
    for name, column in columns.hidden.items():
        if pick(row, column) is None and not columns.hidden_optional:
            raise UnusableError(f"hidden.{name}: {column!r} is null; write what rewards may see")
    for column in filter(None, (columns.instruction, columns.reference)):
        text = pick(row, column)
        if not isinstance(text, str | None):
            raise UnusableError(f"{column!r} is {text!r:.60}, not text; put it in quotes")
        if text and text[0].isascii() and text[0].isalnum():
            continue
        if text is None or all(unicodedata.category(c) in _INVISIBLE or c in _BLANK for c in text):
            raise UnusableError(f"{column!r} is empty; write what is wanted")
    for column in plan.texts:
        cell = row[column] if column in row else pick(row, column, None)
        try:  # nested text too
            text = (
                cell if isinstance(cell, str) else json.dumps(cell, ensure_ascii=False, default=str)
            )
            text.encode()
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
    """How far every picture is read at start. exists: not at all; header: format and size, and
    whether a JPEG or PNG is cut off, about 0.3 ms each; pixels: decoded, about 50 ms per megapixel,
    which alone finds other damage."""


class RowsSource(DataSource[ConfigT]):
    """A `DataSource` over the rows that `read` returns."""

    reads_much = True

    def __init__(self, config: ConfigT, rules: RowRules) -> None:
        """Raises BadRowError (a ValueError) naming file and rows."""
        super().__init__(config, rules)
        self._rows = self.read(config, rules)
        stated = sorted(self._rows.columns.model_fields_set)  # two equal configs may differ in it
        version = f"{config!r} {stated} {self._rows.version}"
        known_bad = rules.checked.get(version)
        if known_bad is None:
            self._rows.check()
        else:
            self._rows.leave_out(known_bad)
        self.findings = Findings(
            self._rows.left_out,
            self._rows.warnings,
            self._rows.unread,
            self._rows.contents,
            {version: list(self._rows.bad)},
            self._rows.most_pictures,
        )
        self.num_skipped = len(self._rows.bad)

    @classmethod
    def is_here(cls, config: ConfigT) -> bool:
        return True

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
