"""Files written so that no crash damages them; pictures."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from hashlib import blake2b
from io import BytesIO, FileIO
from pathlib import Path
from threading import Condition
from typing import IO, Any

import PIL.Image
from cachetools import LRUCache, cached
from PIL import ImageOps
from PIL.Image import Image, Resampling, alpha_composite, new

from rl.config.loading import read_bytes

# ---- private -------------------------------------------------------------------------------------
# Opens a run's files for writing: never through a link, and private where needed.

_REFUSED = {
    errno.ELOOP: "it is a link, and a run does not write through links; remove it",
    errno.ENXIO: "it is not an ordinary file; remove it",
}


def no_links(path: str, flags: int, mode: int = 0o666) -> int:
    """`open(..., opener=no_links)` raises OSError (ELOOP, ENXIO) for a link and for a pipe. A file
    with a second name (a hard link) is first replaced by a copy, so that the other one stays."""
    # O_NONBLOCK has no effect on a regular file; without it, opening a pipe waits for a reader.
    safe = flags & ~os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        descriptor = os.open(path, safe, mode)
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        raise OSError(error.errno, _REFUSED[error.errno], str(path)) from None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise OSError(errno.ENXIO, _REFUSED[errno.ENXIO], str(path))
    if status.st_nlink > 1:
        os.close(descriptor)
        with tempfile.TemporaryDirectory(dir=Path(path).parent) as folder:
            os.replace(shutil.copy2(path, folder), path)
        descriptor = os.open(path, safe, mode)
    if flags & os.O_TRUNC:
        os.ftruncate(descriptor, 0)
    return descriptor


def private(path: str, flags: int) -> int:
    """`open(..., opener=private)`, for completions, replies and logs: opens like `no_links`, and
    then gives the file mode 0600, unless it belongs to another user."""
    descriptor = no_links(path, flags, 0o600)
    with suppress(OSError):
        os.fchmod(descriptor, 0o600)
    return descriptor


def private_folder(path: Path) -> None:
    """Make a folder that only this user may enter, for files that libraries write. Raises OSError
    (ELOOP) if it is a link."""
    require_in_place(path)
    if path.is_symlink():
        raise OSError(errno.ELOOP, _REFUSED[errno.ELOOP], str(path))
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    with suppress(OSError):
        path.chmod(0o700)


# ---- held ----------------------------------------------------------------------------------------
# Stops a run whose folder was moved or deleted, instead of making another folder there.

_held: dict[Path, os.stat_result] = {}


def hold(folder: Path) -> None:
    """Until `release`, nothing is written below `folder` if another one, or none, is there."""
    _held[folder] = folder.stat()


def release(folder: Path) -> None:
    _held.pop(folder, None)


def require_in_place(path: Path) -> None:
    """Raise FileNotFoundError if the held folder that `path` is in was moved or deleted."""
    for folder, status in _held.items():
        in_place = folder.exists() and os.path.samestat(folder.stat(), status)
        if folder in (path, *path.parents) and not in_place:
            raise FileNotFoundError(
                f"{folder} is gone: it was moved or deleted while the run was using it, and "
                "nothing more is written. Put it back (in place of what is there now), and the "
                "same command resumes from its last checkpoint"
            )


# ---- atomic --------------------------------------------------------------------------------------
# Writes files completely or not at all, even in a crash; reads JSONL without damaged lines.

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a full disk, an exhausted quota and the largest size of a file."""

MAX_NESTING = 64
"""Levels of objects and lists; a run's own files have a dozen."""

MAX_ROWS_BYTES = 4 * 10**9
"""Of a JSONL file, which is read as a whole."""

_LINE_ENDS = re.compile("[\x85\u2028\u2029\ud800-\udfff]")
"""Line ends of `str.splitlines` that JSON does not escape, and surrogates, which UTF-8 cannot
encode."""


def fsync(path: Path) -> None:
    """Push a file or folder to the disk; a rename is only as durable as the folder it is in."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(
    path: Path,
    content: str | bytes,
    opener: Callable[[str, int], int] = no_links,
    *,
    durable: bool = True,
) -> None:
    """Replace `path`'s contents completely or not at all; creates the folders above it. `opener` as
    in `open`. Without `durable` a power failure may lose the file. One process writes a file.
    Raises OSErrors, which name the path."""
    require_in_place(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "wb", buffering=0, opener=opener) as file:
        try:
            append(file, content.encode() if isinstance(content, str) else content)
            if durable:
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            error.filename = str(path)
            raise
    if durable:
        fsync(path.parent)


def json_line(value: Mapping[str, Any]) -> str:
    """Strict JSON that every reader takes as one line; NaN and infinities become null."""
    finite = with_leaves(
        value, lambda leaf: None if isinstance(leaf, float) and not math.isfinite(leaf) else leaf
    )
    text = json.dumps(finite, ensure_ascii=False, allow_nan=False)
    return _LINE_ENDS.sub(lambda match: f"\\u{ord(match[0]):04x}", text) + "\n"


def append_line(path: Path, line: str) -> None:
    """Append a line, after a line feed if the file ends in an incomplete line. A failed write does
    not change the file. Raises the same errors as `write_atomically`."""
    require_in_place(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+b", buffering=0, opener=no_links) as file:
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                line = "\n" + line
        append(file, line.encode())


def append(file: FileIO, data: bytes) -> None:
    """Append all of `data` or nothing to a file that was opened by its path, without a buffer.
    Raises OSErrors, which name the path."""
    end = file.seek(0, os.SEEK_END)
    remaining = memoryview(data)
    try:
        while remaining:
            remaining = remaining[file.write(remaining) :]
    except OSError as error:
        file.truncate(end)
        error.filename = str(file.name)  # one from an open file names none
        raise


def lines_of(path: Path) -> list[bytes]:
    """The lines of a file, ends included; none if there is no file. Only b'\\n' ends a line: values
    may hold U+2028 or a lone \\r. Raises OSError as `read_bytes`."""
    try:
        return BytesIO(read_bytes(path, MAX_ROWS_BYTES)).readlines()
    except FileNotFoundError:
        return []


def read_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file, as `row_of`. Raises OSError as `read_bytes`."""
    return row_of(read_bytes(path))


def row_of(line: bytes) -> dict[str, Any] | None:
    """The JSON object of a line; None for anything else and for an object that is nested too deeply
    for recursion."""
    try:
        row = json.loads(line.decode("utf-8"))
        # Each level needs a bracket, so only lines with many brackets have to be walked.
        if line.count(b"[") + line.count(b"{") > MAX_NESTING and _depth(row) > MAX_NESTING:
            return None
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _depth(value: Any) -> int:
    """Levels of objects and lists."""
    if not isinstance(value, dict | list):
        return 0
    inner = value.values() if isinstance(value, dict) else value
    return 1 + max(map(_depth, inner), default=0)


def read_rows(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """The objects of a JSONL file, and the numbers (from 1) of damaged lines; blank lines are
    neither."""
    rows: list[dict[str, Any]] = []
    damaged: list[int] = []
    for number, line in enumerate(lines_of(path), start=1):
        row = row_of(line)
        if row is not None:
            rows.append(row)
        elif line.strip():
            damaged.append(number)
    return rows, damaged


def with_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """A copy of a JSON-like `value` with `change` applied to each key and to each value that is
    neither an object nor a list."""
    if isinstance(value, (list, tuple)):
        return [with_leaves(item, change) for item in value]
    if isinstance(value, (str, int, float)) or not isinstance(value, Mapping):  # the slowest last
        return change(value)
    return {change(key): with_leaves(item, change) for key, item in value.items()}


# ---- images --------------------------------------------------------------------------------------
# Opens pictures, scales them and encodes them.

MAX_AREA_PX = 50_000_000
"""Limit of pixels of a picture: a file of 1 KB can decode to any number, at up to 20 bytes each."""

MAX_SIDE_SUM = 14.3
"""At least (width + height) / sqrt(area) of any picture up to 200:1 (14.21), rounded up."""


def digest(image: Image) -> bytes:
    """A hash that is equal for equal pixels: the cache key of what is computed from a picture."""
    palette = image.palette and image.palette.tobytes()
    header = repr((image.mode, image.size, palette, image.info.get("transparency")))
    return blake2b(header.encode() + image.tobytes(), digest_size=16).digest()


def open_picture(file: Path | IO[bytes], formats: tuple[str, ...] = ("PNG",)) -> Image:
    """A picture, not decoded yet; nothing else calls `PIL.Image.open`. `formats` are Pillow's
    names; never name one that starts a program (EPS) or holds another format (IPTC, ICO, ICNS,
    MIC). Raises DecompressionBombError for more than `MAX_AREA_PX`, and what Pillow raises."""
    image = PIL.Image.open(file, formats=formats)
    if image.width * image.height > MAX_AREA_PX:
        image.close()
        limit = f"{MAX_AREA_PX // 10**6} million pixels are the most"
        raise PIL.Image.DecompressionBombError(f"{image.width}x{image.height}; {limit}")
    return image


def size_of_area(width: int, height: int, area_px: int, multiple_px: int) -> tuple[int, int]:
    """(width, height) of about `area_px` pixels: aspect kept, both sides multiples of
    `multiple_px`, rounded as in diffusers' Qwen-Image pipelines, but never to 0."""
    ratio = width / height
    width_px = math.sqrt(area_px * ratio)
    height_px = width_px / ratio

    def rounded(side_px: float) -> int:
        return max(1, round(side_px / multiple_px)) * multiple_px

    return rounded(width_px), rounded(height_px)


def over_white(image: Image) -> Image:
    """The picture in RGB, on a white background where it is transparent."""
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = alpha_composite(new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def downscale(image: Image, side_px: int) -> Image:
    """`image` with its longer side at most `side_px`, aspect kept; never enlarged."""
    scale = side_px / max(image.size)
    if scale >= 1:
        return image
    width, height = (max(1, round(length * scale)) for length in image.size)
    return image.resize((width, height), Resampling.LANCZOS)


def padded(image: Image, side_px: int) -> Image:
    """An RGB picture in the middle of a white one that has no side below `side_px`."""
    across, down = (max(0, side_px - length) for length in image.size)
    left, top = across // 2, down // 2
    return ImageOps.expand(image, (left, top, across - left, down - top), "white")


def side_by_side(pictures: Sequence[Image]) -> Image:
    """The pictures in a row, aligned at the top, with gaps of 1/16 of the height, on white."""
    height = max(p.height for p in pictures)
    gap_px = height // 16
    sheet = new("RGB", (sum(p.width + gap_px for p in pictures) - gap_px, height), "white")
    left = 0
    for picture in pictures:
        sheet.paste(picture.convert("RGB"), (left, 0))
        left += picture.width + gap_px
    return sheet


@cached(LRUCache(256 * 2**20, getsizeof=len), key=digest, condition=Condition())
def png_bytes(image: Image) -> bytes:
    """PNG in RGB, over white, without metadata. Compression level 1: a third larger, in a fifth of
    the time. The last 256 MiB are cached: judge questions and the record use the same pictures."""
    bare = over_white(image)
    bare.info.clear()
    buffer = io.BytesIO()
    bare.save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue()
