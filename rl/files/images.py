"""Opens pictures, copies them for plugins, scales them and encodes them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from hashlib import blake2b
from pathlib import Path
from threading import Condition
from typing import IO, Any, TypeVar

import PIL.Image
from cachetools import LRUCache, cached
from PIL.Image import Image, Resampling, alpha_composite, new

MAX_AREA_PX = 50_000_000
"""Limit of pixels of a picture: a file of 1 KB can decode to any number, at up to 20 bytes each."""

T = TypeVar("T")


def copied_pictures(value: T) -> T:
    """A copy of `value`, a picture or an object that holds pictures (`Sample`, `RewardInput`, list,
    dict), with its pictures, arrays, tensors, lists, dicts and sets copied: a plugin may change its
    copy without affecting others."""
    copied: Any = value
    if is_dataclass(copied) and not isinstance(copied, type):
        copies = {
            f.name: copied_pictures(getattr(copied, f.name)) for f in fields(copied) if f.init
        }
        copied = replace(copied, **copies)
    elif type(copied) in (list, tuple):
        copied = type(copied)(map(copied_pictures, copied))
    elif type(copied) is dict:
        copied = {key: copied_pictures(item) for key, item in copied.items()}
    elif isinstance(copied, Image | set) or hasattr(copied, "setflags"):  # a numpy array
        copied = copied.copy()
    elif hasattr(copied, "clone"):  # a tensor of torch, which is not imported here
        copied = copied.clone()
    return copied


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
    width, height = (max(side_px, length) for length in image.size)
    sheet = new("RGB", (width, height), "white")
    sheet.paste(image, ((width - image.width) // 2, (height - image.height) // 2))
    return sheet


def side_by_side(pictures: Sequence[Image]) -> Image:
    """The pictures in a row, aligned at the top, on white."""
    height, width = max(p.height for p in pictures), sum(p.width for p in pictures)
    sheet = new("RGB", (width, height), "white")
    left = 0
    for picture in pictures:
        sheet.paste(picture.convert("RGB"), (left, 0))
        left += picture.width
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
