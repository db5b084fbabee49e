"""Rows of data sources: JSON lines, pictures, samples, and what is wrong with them."""

from __future__ import annotations

import hashlib
import io
import json
import os
import unicodedata
from abc import abstractmethod
from array import array
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from PIL import Image, ImageOps, UnidentifiedImageError
from pydantic import Field, model_validator

from rl.api.data import DataSource, Findings, RowRules
from rl.api.plugin import ConfigT, FileConfig
from rl.api.types import Sample, UnusableSampleError
from rl.config.loading import not_a_file
from rl.config.schema import Section
from rl.console import warn
from rl.files import downscale, open_picture, over_white
from rl.printing import excerpt
from rl.progress import counted

if TYPE_CHECKING:
    from PIL import Image

# ---- sample pictures -----------------------------------------------------------------------------
# Opens pictures as users have them: a path, bytes, or a `datasets` image cell.

MIN_SIDE_PX = 8
MAX_ASPECT_RATIO = 200
"""Largest ratio that Qwen2-VL's processors accept."""
MAX_FILE_SIDE_PX = 65_535
"""The longest side that a JPEG can have."""
MAX_PATH_SHOWN = 250
LEAST_WHITE = 32_768
"""A 16-bit grey picture whose brightest pixel is below may be of 12 or 14 bits, or signed."""
_animated: list[str] = []  # the first animated file of this process
_unreadable_profiles: list[str] = []  # the first file with one
ENDS = {"JPEG": b"\xff\xd9", "PNG": b"IEND"}
"""What a whole file of a format has at its end; compressed pixels of a JPEG never contain it."""
SCAN = b"\xff\xda"
"""What the compressed pixels of a JPEG begin with."""
TAIL_BYTES = 4096
FLOATS = "{} holds floating-point pixels of unknown range; save it as 8-bit PNG"
LFS_POINTER = b"version https://git-lfs"
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")
"""Formats that are read, by Pillow's names; `open_picture` lists formats that must not be read."""


class UnusableError(ValueError):
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
        if image.mode == "F":
            raise UnusableError(FLOATS.format(_name(located)))
        size, end = image.size, ENDS.get(image.format or "", b"")
    tail = _tail(located)
    pixels = tail[max(0, tail.rfind(SCAN)) :]  # not those of a thumbnail
    if end not in pixels:  # or the file goes on behind its picture, as phones' may
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
    kept, as RGBA), 16-bit grey scaled to 8 bits, CMYK converted; an animation gives its first
    frame. Raises UnusableError.
    """
    with _open(located, max_side_px) as image:
        try:
            image.load()
            if getattr(image, "is_animated", False) and not _animated and image.format != "MPO":
                _animated.append(_name(located))
                warn(f"{_animated[0]} is animated: only the first picture of such a file is used")
            return _to_8_bits(ImageOps.exif_transpose(image), _name(located), keeps_transparency)
        except UnusableError:
            raise
        except Exception as error:
            # Pillow's decoders raise whatever a damaged file leads them to (OSError, SyntaxError,
            # ValueError, struct.error, IndexError); the user gets the same message for all.
            raise UnusableError(_broken(located, error)) from error


def load_image(
    image: Image.Image | Path | str, max_side_px: int, keeps_transparency: bool = False
) -> tuple[Image.Image, tuple[int, int] | None]:
    """(a user's picture as from `decode`, with its longer side at most `max_side_px`; its original
    (width, height) if it was scaled down, else None). Raises UnusableError."""
    if isinstance(image, Image.Image):
        upright = ImageOps.exif_transpose(image)
        picture = _to_8_bits(upright, "the picture", keeps_transparency)
    else:
        picture = decode(locate(str(image), Path()), MAX_FILE_SIDE_PX, keeps_transparency)
    size = picture.size
    picture = downscale(picture, max_side_px)
    return picture, None if picture.size == size else size


def _open(located: Path | bytes, max_side_px: int) -> Image.Image:
    try:
        file = io.BytesIO(located) if isinstance(located, bytes) else located
        image = open_picture(file, FORMATS)
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
    width, height = image.size
    size = f"{_name(located)} is {width}x{height} px"
    if max(width, height) > max_side_px:
        raise UnusableError(
            f"{size}, longer than data.max_image_side_px={max_side_px}; "
            "downscale it, or raise that key"
        )
    if min(width, height) < MIN_SIDE_PX:
        raise UnusableError(f"{size}; both sides must be at least {MIN_SIDE_PX} px")
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise UnusableError(f"{size}; one side is more than {MAX_ASPECT_RATIO} times the other")
    return image


def _to_8_bits(image: Image.Image, name: str, keeps_transparency: bool) -> Image.Image:
    if image.mode == "F":
        raise UnusableError(FLOATS.format(name))
    if image.mode.startswith("I"):
        import numpy as np

        # Pillow's own conversion clips 16-bit greys at 255, which makes most pictures white.
        grey = np.asarray(image).astype(np.int64)
        most = int(grey.max())
        if grey.min() < 0 or 0 < most < LEAST_WHITE or most > 65535:
            raise UnusableError(
                f"{name} holds 16- or 32-bit greys from {grey.min()} to {most}: which of them is "
                "white is unknown; save it as 8-bit PNG"
            )
        grey[grey == image.info.get("transparency")] = 65535
        return Image.fromarray((grey // 257).astype(np.uint8)).convert("RGB")
    image = _in_srgb(image, name)
    if keeps_transparency and image.has_transparency_data:
        return image.convert("RGBA")
    return over_white(image)


def _in_srgb(image: Image.Image, name: str) -> Image.Image:
    """The picture converted from the colour profile of its file, as a viewer shows it; unchanged if
    there is none, or if it cannot be read (the first one is a warning)."""
    from PIL import ImageCms

    if not (profile := image.info.get("icc_profile")):
        return image
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        if "sRGB" in ImageCms.getProfileDescription(source):
            return image  # a conversion would only add rounding
        if image.has_transparency_data or image.mode == "P":
            image = image.convert("RGBA" if image.has_transparency_data else "RGB")
        mode = "RGBA" if image.mode == "RGBA" else "RGB"
        target = ImageCms.createProfile("sRGB")
        return ImageCms.profileToProfile(image, source, target, outputMode=mode) or image
    except (ImageCms.PyCMSError, OSError) as error:
        if not _unreadable_profiles:
            _unreadable_profiles.append(name)
            warn(f"the colour profile of {name} cannot be used ({error}); it is read as sRGB")
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


# ---- jsonl ---------------------------------------------------------------------------------------
# Reads files with one row per line; a row is parsed when it is asked for.


class Lines(Sequence[Mapping[str, Any]]):
    """The lines of files that are not blank, as rows.

    The files' bytes stay in memory, so that a file may change while a run reads it; the rows do
    not, which would take several times as much. Only a line feed ends a line: a value may hold
    U+2028 and similar characters.
    """

    def __init__(self, files: Sequence[Path], parse: Callable[[str], Any] | None = None) -> None:
        """`parse`: converts a line to a row; None = JSON, where an object with a repeated key is
        refused. Raises BadRowError if a file does not exist, is empty or cannot be read."""
        self._parse = parse or json.JSONDecoder(object_pairs_hook=_unique_keys).decode
        self.numbers = array("Q")
        """The number of each row's line in its file, from 1."""
        self.nulls: Mapping[str, None] = {}
        """Keys that every row gets."""
        self._starts = array("Q")
        contents = [_content(file) for file in files]
        self._content = b"\n".join(contents)
        start = 0
        for file, content in zip(files, contents, strict=True):
            end, number, num_before = start + len(content), 0, len(self._starts)
            while start <= end:
                number += 1
                stop = self._content.find(b"\n", start, end)
                stop = end if stop < 0 else stop
                if not self._content[start:stop].isspace() and stop > start:
                    self._starts.append(start)
                    self.numbers.append(number)
                start = stop + 1
            if len(self._starts) == num_before:
                raise BadRowError(f"{file} is empty; write one row per line")

    @property
    def version(self) -> str:
        """A hash of the files' bytes."""
        return hashlib.sha256(self._content).hexdigest()

    def readable(self) -> Iterator[Mapping[str, Any]]:
        """The rows that can be read."""
        for index in range(len(self)):
            with suppress(UnusableError):
                yield self[index]

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: Any) -> Any:
        """Raises UnusableError for a line that is no row."""
        start = self._starts[index]
        stop = self._content.find(b"\n", start)
        try:
            line = self._content[start : None if stop < 0 else stop].strip().decode("utf-8")
            row = self._parse(line)
        except UnicodeDecodeError as error:
            raise UnusableError("is not UTF-8; save the file as UTF-8") from error
        except (ValueError, RecursionError) as error:  # also too long numbers, too deep nesting
            raise UnusableError(f"is not JSON ({error}); one object per line") from error
        if not isinstance(row, dict):
            raise UnusableError('is not an object {"key": ...}')
        return {**self.nulls, **row} if self.nulls else row


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The pairs as a dict. Raises ValueError for a repeated key."""
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in row if names.count(name) > 1)
        raise ValueError(f"it has {repeated!r:.60} twice")
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
