"""Opens pictures, copies them for plugins, scales them and encodes them."""

from __future__ import annotations

import io
from dataclasses import fields, is_dataclass, replace
from hashlib import blake2b
from pathlib import Path
from threading import Condition
from typing import IO, Any, TypeVar

import PIL.Image
from cachetools import LRUCache, cached
from PIL.Image import Image, Resampling, alpha_composite, new

MAX_AREA_PX = 50_000_000
"""Most pixels of a picture: a file of 1 KB can hold any number, up to 20 bytes each in memory."""

T = TypeVar("T")


def own_pictures(value: T) -> T:
    """A copy of `value`, a picture or what holds pictures (a `Sample`, `RewardInput`, list, dict),
    with its pictures, arrays, tensors, lists, dicts and sets copied: a plugin may change its copy
    without affecting others."""
    given: Any = value
    if is_dataclass(given) and not isinstance(given, type):
        held = {f.name: own_pictures(getattr(given, f.name)) for f in fields(given) if f.init}
        given = replace(given, **held)
    elif type(given) in (list, tuple):
        given = type(given)(map(own_pictures, given))
    elif type(given) is dict:
        given = {key: own_pictures(item) for key, item in given.items()}
    elif isinstance(given, Image | set) or hasattr(given, "setflags"):  # a numpy array
        given = given.copy()
    elif hasattr(given, "clone"):  # a tensor of torch, which is not imported here
        given = given.clone()
    return given


def digest(image: Image) -> bytes:
    """Equal for pictures with equal pixels; the cache key of what is computed from a picture."""
    palette = image.palette and image.palette.tobytes()
    form = repr((image.mode, image.size, palette, image.info.get("transparency")))
    return blake2b(form.encode() + image.tobytes(), digest_size=16).digest()


def open_picture(file: Path | IO[bytes], formats: tuple[str, ...] = ("PNG",)) -> Image:
    """A picture, not decoded yet; the only place where Pillow opens one. `formats` are Pillow's
    names; never name one that starts a program (EPS) or holds another format (IPTC, ICO, ICNS,
    MIC). Raises DecompressionBombError for more than `MAX_AREA_PX`, and what Pillow raises."""
    image = PIL.Image.open(file, formats=formats)
    if image.width * image.height > MAX_AREA_PX:
        image.close()
        most = f"{MAX_AREA_PX // 10**6} million pixels are the most"
        raise PIL.Image.DecompressionBombError(f"{image.width}x{image.height}; {most}")
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


@cached(LRUCache(256 * 2**20, getsizeof=len), key=digest, condition=Condition())
def png_bytes(image: Image) -> bytes:
    """PNG in RGB, over white, without metadata. Compression level 1: a third larger, in a fifth of
    the time. The last 256 MiB are cached: judge questions and the record use the same pictures."""
    bare = over_white(image)
    bare.info.clear()
    buffer = io.BytesIO()
    bare.save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue()
