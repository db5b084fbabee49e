"""Rows of data sources: JSON lines, pictures, samples, and what is wrong with them."""

from __future__ import annotations

import hashlib
import io
import json
import os
from abc import abstractmethod
from array import array
from collections.abc import Callable, Container, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from PIL import Image, ImageOps, UnidentifiedImageError
from pydantic import Field, model_validator

from rl.api.data import DataSource, Findings, RowRules
from rl.api.plugin import ConfigT, FileConfig
from rl.api.types import Sample, UnusableSampleError
from rl.config.loading import not_a_file
from rl.config.schema import Section
from rl.files import downscale, open_picture, over_white
from rl.model_files import LFS_POINTER
from rl.printing import excerpt
from rl.progress import counted

# ---- sample pictures -----------------------------------------------------------------------------
# Opens pictures as users have them: a path, bytes, or a `datasets` image cell.

MIN_SIDE_PX = 8
MAX_ASPECT_RATIO = 200
"""Largest ratio that Qwen2-VL's processors accept."""
MAX_FILE_SIDE_PX = 65_535
"""The longest side that a JPEG can have."""
MAX_PATH_SHOWN = 250
ENDS = {"JPEG": b"\xff\xd9", "PNG": b"IEND"}
"""What a whole file of a format has at its end; compressed pixels of a JPEG never contain it."""
TAIL_BYTES = 4096
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")
"""Formats that are read, by Pillow's names; `open_picture` lists formats that must not be read."""


class UnusableError(UnusableSampleError):
    """A cell of a row cannot be used; the message says why and what to do."""


def locate(value: Any, folder: Path) -> Path | bytes:
    """The path or the bytes of the picture in a cell of a data set.

    A path is relative to `folder`. A mapping is a cell of `datasets.Image(decode=False)`:
    `{bytes, path}`. Raises UnusableError when there is nothing to open.
    """
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes) and value:
        return value
    if not isinstance(value, str) or not value.strip():
        raise UnusableError(f"holds {value!r:.60}, not a picture; give a file path")
    if value.startswith(("http://", "https://", "data:")):
        raise UnusableError(f"is a URL ({value!r:.60}); save it as a file and give its path")
    path = folder / value
    if why := not_a_file(path):
        path_text = excerpt(str(path), MAX_PATH_SHOWN)
        raise UnusableError(f"{path_text} {why}; relative paths start at {folder}")
    return path


def check_header(located: Path | bytes, max_side_px: int) -> tuple[int, int]:
    """(width, height) of a picture, px. Raises UnusableError if its header is not a picture's, its
    size is refused, or it is a cut-off JPEG or PNG.

    Takes about 0.3 ms. Other damage of the body passes; `decode` finds it.
    """
    with _open(located, max_side_px) as image:
        size, end = image.size, ENDS.get(image.format or "", b"")
    if end not in _tail(located):  # or the file goes on behind its picture, as phones' may
        decode(located, max_side_px)
    return size


def _tail(located: Path | bytes) -> bytes:
    if isinstance(located, bytes):
        return located[-TAIL_BYTES:]
    with open(located, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        return file.read()


def decode(
    located: Path | bytes, max_side_px: int, keeps_transparency: bool = False
) -> Image.Image:
    """The picture as 8-bit RGB in sRGB, upright.

    EXIF rotation is applied, a colour profile converted to sRGB, transparency replaced by white (or
    kept, as RGBA), CMYK converted; an animation gives its first frame. Raises UnusableError.
    """
    with _open(located, max_side_px) as image:
        try:
            image.load()
            return _to_rgb(ImageOps.exif_transpose(image), keeps_transparency)
        except Exception as error:
            # Pillow's decoders raise whatever a damaged file leads them to (OSError, SyntaxError,
            # ValueError, struct.error, IndexError); the user gets the same message for all.
            raise UnusableError(_broken(located, error)) from error


def load_image(
    image: Image.Image | Path | str, max_side_px: int, keeps_transparency: bool = False
) -> Image.Image:
    """A user's picture as from `decode`, with its longer side at most `max_side_px`. Raises
    UnusableError."""
    if isinstance(image, Image.Image):
        picture = _to_rgb(ImageOps.exif_transpose(image), keeps_transparency)
    else:
        picture = decode(locate(str(image), Path()), MAX_FILE_SIDE_PX, keeps_transparency)
    return downscale(picture, max_side_px)


def _open(located: Path | bytes, max_side_px: int) -> Image.Image:
    try:
        image = open_picture(
            io.BytesIO(located) if isinstance(located, bytes) else located, FORMATS
        )
    except UnidentifiedImageError as error:
        if _tail(located).startswith(LFS_POINTER):
            raise UnusableError(
                f"{_name(located)} is a pointer of Git LFS, not the picture; run git lfs pull"
            ) from error
        raise UnusableError(
            f"{_name(located)} is none of {', '.join(FORMATS)}, or is damaged; save it as "
            "PNG or JPEG (HEIC, the format of many phones, is not supported)"
        ) from error
    except Image.DecompressionBombError as error:
        raise UnusableError(
            f"{_name(located)} is absurdly large ({error}); downscale it"
        ) from error
    except Exception as error:
        raise UnusableError(_broken(located, error)) from error
    if image.mode[0] in "IF":
        raise UnusableError(
            f"{_name(located)} holds greys of more than 8 bits, of which the white is unknown; "
            "save it as 8-bit PNG"
        )
    longer, shorter = max(image.size), min(image.size)
    if longer > max_side_px or shorter < MIN_SIDE_PX or longer > MAX_ASPECT_RATIO * shorter:
        raise UnusableError(
            f"{_name(located)} is {image.width}x{image.height} px; sides have {MIN_SIDE_PX} to "
            f"{max_side_px} px, and none is more than {MAX_ASPECT_RATIO} times the other; scale it"
        )
    return image


def _to_rgb(image: Image.Image, keeps_transparency: bool) -> Image.Image:
    image = _in_srgb(image)
    if keeps_transparency and image.has_transparency_data:
        return image.convert("RGBA")
    return over_white(image)


def _in_srgb(image: Image.Image) -> Image.Image:
    """The picture converted from the colour profile of its file, as a viewer shows it; unchanged if
    there is none, or if it cannot be read."""
    from PIL import ImageCms

    if not (profile := image.info.get("icc_profile")):
        return image
    with suppress(ImageCms.PyCMSError, OSError):
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        if "sRGB" in ImageCms.getProfileDescription(source):
            return image  # a conversion would only add rounding
        if image.has_transparency_data or image.mode == "P":
            image = image.convert("RGBA" if image.has_transparency_data else "RGB")
        mode = "RGBA" if image.mode == "RGBA" else "RGB"
        target = ImageCms.createProfile("sRGB")
        return ImageCms.profileToProfile(image, source, target, outputMode=mode) or image
    return image


def _broken(located: Path | bytes, error: Exception) -> str:
    return f"{_name(located)} is corrupt or truncated ({error}); replace the file"


def _name(located: Path | bytes) -> str:
    return str(located) if isinstance(located, Path) else f"the embedded picture ({len(located)} B)"


# ---- sample rows ---------------------------------------------------------------------------------
# Turns the rows of a user's data into samples, and reports the bad rows.

PictureCheck = Literal["exists", "header", "pixels"]
MAX_PROBLEMS_SHOWN = 10
MAX_SHOWN = 500
"""Limit of characters of one problem's message: it may quote a path or key of any length."""
MAX_ORIGIN = 40
"""Limit of characters of the rows' origin on a line of progress."""
MAX_COLUMNS_SHOWN = 120
_MISSING = object()
_TO_JSON = json.JSONEncoder(ensure_ascii=False, default=str)
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
    """True: a hidden column may be null or missing in rows where no reward needs it."""

    @model_validator(mode="after")
    def _refuse_hidden_that_policy_reads(self) -> Columns:
        for name, column in self.hidden.items():
            if column in (self.instruction, *self.sources()):
                raise ValueError(
                    f"hidden.{name}: column {column!r} is also what the policy reads; name the "
                    "column that holds the answer alone"
                )
        return self

    @cached_property
    def named(self) -> Sequence[str]:
        """The columns every row must have, besides those of its source pictures."""
        by_choice = [key for key in ("target", "id", "category") if key in self.model_fields_set]
        columns = [getattr(self, key) for key in ("instruction", "reference", *by_choice)]
        hidden = [] if self.hidden_optional else self.hidden.values()
        return [*filter(None, columns), *hidden]

    @cached_property
    def texts(self) -> Sequence[str]:
        """The columns that hold text."""
        texts = (self.instruction, self.reference, self.id, self.category, *self.hidden.values())
        return [*filter(None, texts)]

    def sources(self, keys: Container[str] = ()) -> tuple[str, ...]:
        """The columns of the source pictures in a row or table that has these keys."""
        if isinstance(self.source, tuple):
            return self.source
        if "source" not in self.model_fields_set and SEVERAL in keys and self.source not in keys:
            return (SEVERAL,)
        return (self.source,) if self.source else ()

    def read(self) -> set[str]:
        """All columns that may be read."""
        return {*self.texts, *self.sources(), *self.sources({SEVERAL}), self.target}

    def provides(self) -> frozenset[str]:
        """What every sample has besides its instruction, named as in a reward's `needs`."""
        has = {
            "source": self.source and not self.source_optional,
            "target": self.target and "target" in self.model_fields_set,
            "reference": self.reference,
        }
        hidden = (f"hidden:{name}" for name in self.hidden)
        return frozenset([*(name for name in has if has[name]), *hidden])


def pick(row: Mapping[str, Any], column: str, default: Any = _MISSING) -> Any:
    """The cell at `column`, which may be a dotted path; else `default`; else UnusableError. None if
    the config names no column ('')."""
    if not column:
        return None
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


class CheckedSource(DataSource[ConfigT]):
    """A source whose rows are checked once per start: a bad one stops the run or is left out."""

    def __init__(self, config: ConfigT, rules: RowRules) -> None:
        super().__init__(config, rules)
        self._rules = rules
        self._kept: Sequence[int] = ()
        """Indices of the rows that are samples."""

    def _check_all(self, version: str, name: str, num_rows: int, limit: int | None = None) -> None:
        """Call `_check_row` for each row, or the first `limit` of them, unless this start has
        checked the `version` of these rows. Raises BadRowError for bad rows, unless they are to be
        skipped, and if none is left. Fills `findings`; `name` is what progress calls the rows."""
        bad: Sequence[int] | None = self._rules.checked.get(version)
        messages: list[str] = []
        if bad is None:
            bad = array("Q")
            with counted(name, num_rows) as progress:
                for index in range(num_rows)[:limit]:
                    if index % 64 == 0:
                        progress.at(index)
                    try:
                        self._check_row(index)
                    # A row may hold anything, and whatever it raises is its fault: pyarrow's
                    # UnicodeDecodeError, RecursionError, ValueError for a number without end, ...
                    except Exception as error:
                        bad.append(index)
                        if len(bad) <= MAX_PROBLEMS_SHOWN:
                            messages.append(self._named(index, error))
        if (num_more := len(bad) - len(messages)) and messages:
            messages.append(f"... and {num_more} more bad rows")
        listed = "\n".join(messages)
        if messages and self._rules.on_bad_row == "error":
            raise BadRowError(
                f"{listed}\nFix these rows, or leave them out with data.on_bad_row: 'skip'."
            )
        left_out = set(bad)
        self._kept = range(num_rows)
        if bad:
            self._kept = array("Q", (index for index in self._kept if index not in left_out))
        if not self._kept:
            raise BadRowError(f"{name}: no row is left:\n{listed}")
        self.num_skipped = len(bad)
        self.findings = Findings(messages, checked={version: list(bad)})

    @abstractmethod
    def _check_row(self, index: int) -> None:
        """Raises any error for a row that cannot be used."""

    @abstractmethod
    def _place(self, index: int) -> str:
        """The name of a row in messages."""

    def _named(self, index: int, error: Exception) -> str:
        """The message of a row's error."""
        is_known = isinstance(error, UnusableSampleError)
        message = str(error) if is_known else f"cannot be read ({type(error).__name__}: {error})"
        return f"{self._place(index)}: {excerpt(message, MAX_SHOWN)}"

    def __len__(self) -> int:
        return len(self._kept)


class RowsConfig(FileConfig):
    """The keys of a source of rows: columns, and how pictures are found and checked."""

    columns: Columns = Columns()
    """The key or column of a row for each field of a sample; `a.b.0` reaches into nested ones."""
    image_folder: str = ""
    """Where relative picture paths start; '' = the file's own folder."""
    picture_check: PictureCheck = "header"
    """How far every picture is read at start. exists: not at all; header: format and size, and
    whether a JPEG or PNG is cut off, about 0.3 ms each; pixels: decoded, about 50 ms per megapixel,
    which alone finds other damage."""


@dataclass(frozen=True)
class Rows:
    """Rows as they were read, good and bad."""

    rows: Sequence[Mapping[str, Any]]
    """May raise any error for a row that cannot be read."""
    numbers: Sequence[int]
    """The number of each row in `origin`, from 1, for messages."""
    id_numbers: Sequence[int]
    """The number of each row in its default id."""
    origin: str
    """A file, or data set and split."""
    version: str
    """A hash of what was read."""
    columns: Columns
    folder: Path
    """Where relative picture paths start."""
    keys: Set[str] = frozenset()
    """The columns of a table."""


class RowsSource(CheckedSource[ConfigT]):
    """The rows that `read` returns, as samples. Pictures are decoded when a sample is taken."""

    def __init__(self, config: ConfigT, rules: RowRules) -> None:
        """Raises BadRowError (a ValueError) naming file and rows."""
        super().__init__(config, rules)
        self._table = table = self.read(config)
        # Without the folder: moving the data must not change seeds that derive from ids.
        self._name = table.origin.rsplit("/", 1)[-1]
        self._picture_check = config.picture_check if isinstance(config, RowsConfig) else "header"
        self._keys = set(table.keys)
        self._row_of_id: dict[int, int] = {}
        self._most_pictures = 1
        self._num_opened = self._num_unopened = self._num_uncounted = 0
        stated = sorted(table.columns.model_fields_set)  # two equal configs may differ in it
        name = f"rows of {excerpt(self._name, MAX_ORIGIN)}"
        self._check_all(f"{config!r} {stated} {table.version}", name, len(table.rows))
        self._row_of_id.clear()
        self.findings = replace(
            self.findings, unread=[*self._unread()], most_pictures=self._most_pictures
        )

    @classmethod
    @abstractmethod
    def read(cls, config: ConfigT) -> Rows:
        """All rows, including bad ones."""

    @classmethod
    def provides(cls, config: ConfigT) -> frozenset[str]:
        return config.columns.provides() if isinstance(config, RowsConfig) else frozenset()

    def __getitem__(self, index: int) -> Sample:
        """Raises BadRowError when the row, or one of its pictures, turns out to be unusable."""
        index = self._kept[index]
        try:
            row = self._table.rows[index]
            *sources, target = self._read(row, self._decoded)
        except Exception as error:  # as in `_check_all`
            raise BadRowError(self._named(index, error)) from error
        return replace(self._sample(index, row), sources=tuple(sources), target=target)

    def _sample(self, index: int, row: Mapping[str, Any]) -> Sample:
        """The sample without its pictures."""
        columns = self._table.columns
        category = pick(row, columns.category, None)
        return Sample(
            id=self._id(index, row),
            instruction=pick(row, columns.instruction).strip(),
            category=str(category) if category is not None else "",
            reference=pick(row, columns.reference, None),
            hidden={name: pick(row, column, None) for name, column in columns.hidden.items()},
        )

    def id_of(self, index: int) -> str:
        """The id of a sample, without opening its pictures."""
        return self._id(self._kept[index], self._table.rows[self._kept[index]])

    def number_of(self, index: int) -> int:
        """The number of a sample's row in its default id."""
        return self._table.id_numbers[self._kept[index]]

    def _check_row(self, index: int) -> None:
        row = self._table.rows[index]
        if not row.keys() <= self._keys:
            self._keys.update(row)
        *sizes, _ = self._read(row, self._size_of)
        sample = self._sample(index, row)
        key = hash(sample.id)
        if key in self._row_of_id:
            first = self._table.numbers[self._row_of_id[key]]
            raise UnusableError(f"id {sample.id!r} is already that of row {first}")
        self._num_uncounted += not self._rules.check(sample.id, sample.instruction, sizes, None)
        for check in self._rules.sample_checks:
            check(sample)
        self._row_of_id[key] = index
        self._most_pictures = max(self._most_pictures, len(sizes))

    def _unread(self) -> Iterator[str]:
        read = self._table.columns.read()
        if others := sorted(self._keys - {column.split(".")[0] for column in read} - read):
            yield f"columns {excerpt(', '.join(others), MAX_COLUMNS_SHOWN)}"
        if self._num_unopened:
            yield f"{self._num_unopened} pictures, which exist"
        if self._num_uncounted:
            yield (
                f"tokens of {self._num_uncounted} prompts, whose pictures or tokenizer are not here"
            )

    def _read(self, row: Mapping[str, Any], use: Callable[[Any, bool], Any]) -> list[Any]:
        """What `use(cell, is a source)` makes of the cell of each of the row's source pictures and,
        last, of its reference edit, None without one. Raises any exception for a bad row."""
        columns = self._table.columns
        check_text(row, columns)
        cells = source_cells(row, columns)
        limit = self._rules.max_pictures
        if limit is not None and len(cells) > limit:
            raise UnusableError(
                f"has {len(cells)} source pictures, but this run accepts {limit or 'none'}; give "
                "fewer, or choose a renderer and policy that read more (renderer.max_pictures)"
            )
        target = pick(row, columns.target, None)
        has_target = target is not None or columns.target in columns.named
        used: list[Any] = []
        place = ""
        try:
            for number, (column, cell) in enumerate(cells, 1):
                label = "source picture" if len(cells) == 1 else f"source picture {number}"
                place = f"{label} ({column!r})"
                used.append(use(cell, True))
            place = f"target picture ({columns.target!r})"
            used.append(use(target, False) if has_target else None)
        except UnusableError as error:
            raise UnusableError(f"{place}: {error}") from error
        return used

    def _decoded(self, cell: Any, is_source: bool) -> Image.Image:
        keeps_transparency = is_source and self._rules.keeps_transparency
        located = locate(cell, self._table.folder)
        return decode(located, self._rules.max_image_side_px, keeps_transparency)

    def _size_of(self, cell: Any, is_source: bool) -> tuple[int, int] | None:
        """(width, height) of a picture, px; None if it was not opened."""
        located, opens = locate(cell, self._table.folder), self._rules.opens
        if self._picture_check == "exists" or (opens is not None and self._num_opened >= opens):
            self._num_unopened += 1
            return None
        self._num_opened += 1
        if self._picture_check == "pixels":
            return decode(located, self._rules.max_image_side_px).size
        return check_header(located, self._rules.max_image_side_px)

    def _place(self, index: int) -> str:
        return f"{self._table.origin}, row {self._table.numbers[index]}"

    def _id(self, index: int, row: Mapping[str, Any]) -> str:
        identity = pick(row, self._table.columns.id, None)
        return (
            f"{self._name}:{self._table.id_numbers[index]}" if identity is None else str(identity)
        )


def source_cells(row: Mapping[str, Any], columns: Columns) -> list[tuple[str, Any]]:
    """(column, cell) of each source picture of a row, in order. Raises UnusableError if a column is
    missing, and if both default ones hold pictures."""
    filled: list[str] = []
    if SEVERAL in row and "source" not in columns.model_fields_set:
        filled = [key for key in (SEVERAL, *columns.sources()) if row.get(key) not in (None, [])]
        if len(filled) > 1:
            raise UnusableError(
                f"has both {columns.source!r} and {SEVERAL!r}; keep one of them, or name the "
                "one that is meant in the source's `columns`"
            )
    names = columns.sources(filled or row)
    cells: list[tuple[str, Any]] = []
    for number, column in enumerate(names):
        cell = pick(row, column, None if columns.source_optional else _MISSING)
        may_lack = number > 0 or columns.source_optional
        if isinstance(cell, list) and (cell or may_lack):
            cells += [(column, item) for item in cell]
        elif cell is not None or not may_lack:
            cells.append((column, cell))
    return cells


def check_text(row: Mapping[str, Any], columns: Columns) -> None:
    """Raises UnusableError if a row lacks a text, or has an empty one."""
    for column in columns.named:
        pick(row, column)
    for name, column in columns.hidden.items():
        if not columns.hidden_optional and pick(row, column) is None:
            raise UnusableError(f"hidden.{name}: {column!r} is null; write what rewards may see")
    for column in filter(None, (columns.instruction, columns.reference)):
        text = pick(row, column)
        if not isinstance(text, str | None):
            raise UnusableError(f"{column!r} is {text!r:.60}, not text; put it in quotes")
        if not text or text.isspace():
            raise UnusableError(f"{column!r} is empty; write what is wanted")
    cells = [pick(row, column, None) for column in columns.texts]
    try:
        _TO_JSON.encode(cells).encode()  # nested text, too
    except UnicodeEncodeError as error:
        raise UnusableError(
            "holds half a character (a lone surrogate), which no text has; fix it"
        ) from error


# ---- jsonl ---------------------------------------------------------------------------------------
# Reads files with one row per line; a row is parsed when it is asked for.


class Lines(Sequence[Mapping[str, Any]]):
    """The lines of a file that are not blank, as rows.

    The file's bytes stay in memory, so that it may change while a run reads it; the rows do not,
    which would take several times as much. Only a line feed ends a line: a value may hold U+2028
    and similar characters.
    """

    def __init__(self, *files: Path, parse: Callable[[str], Any] | None = None) -> None:
        """`files`: read as one. `parse`: converts a line to a row; None = JSON. Raises BadRowError
        if a file does not exist or cannot be read, or if all are empty."""
        self._parse = parse or json.loads
        content = b"\n".join(map(_content, files))
        self.version = hashlib.sha256(content).hexdigest()
        lines = [(n, line) for n, line in enumerate(content.split(b"\n"), 1) if line.strip()]
        if not lines:
            raise BadRowError(f"{files[0]} is empty; write one row per line")
        self.numbers, self._lines = zip(*lines, strict=True)
        """The number of each row's line, from 1; the lines."""

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: Any) -> Any:
        """Raises UnusableError for a line that is no row."""
        try:
            row = self._parse(self._lines[index].strip().decode("utf-8"))
        except UnicodeDecodeError as error:
            raise UnusableError("is not UTF-8; save the file as UTF-8") from error
        except (ValueError, RecursionError) as error:  # also too long numbers, too deep nesting
            raise UnusableError(f"is not JSON ({error}); one object per line") from error
        if not isinstance(row, dict):
            raise UnusableError('is not an object {"key": ...}')
        return row


def _content(path: Path) -> bytes:
    if why := not_a_file(path):
        raise BadRowError(
            f"{excerpt(str(path), MAX_SHOWN)} {why}; give the file's path (from {Path.cwd()})"
        )
    try:
        return path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise BadRowError(f"{path} cannot be read ({error.strerror})") from error
