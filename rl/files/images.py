"""Opens pictures, scales them and encodes them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import IO
from weakref import ref

import PIL.Image
from PIL.Image import Image, Resampling, alpha_composite, new

MAX_AREA_PX = 50_000_000
"""Of a picture that is decoded. A file of 1 KB can hold any number of pixels, and a decoder takes
up to 20 bytes for each."""

_encoded: dict[int, tuple[ref[Image], bytes]] = {}
"""By a picture's id, which is its own as long as it lives."""


def open_picture(file: Path | IO[bytes], formats: tuple[str, ...] = ("PNG",)) -> Image:
    """A picture, not decoded yet; the only place where Pillow opens one (tests/test_layout.py).

    `formats` are Pillow's names, PNG being what a run writes. Formats that start a program (EPS
    starts Ghostscript) or hold a picture of another format (IPTC, ICO, ICNS, MIC) are not to be
    named. Raises DecompressionBombError for more than `MAX_AREA_PX`, and what Pillow raises.
    """
    image = PIL.Image.open(file, formats=formats)
    if image.width * image.height > MAX_AREA_PX:
        image.close()
        most = f"{MAX_AREA_PX // 10**6} million pixels are the most"
        raise PIL.Image.DecompressionBombError(f"{image.width}x{image.height}; {most}")
    return image


def over_white(image: Image) -> Image:
    """RGB; what is transparent shows white behind it."""
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


def png_bytes(image: Image) -> bytes:
    """Lossless RGB, over white, without metadata: whoever reads it sees the pixels and no place or
    owner.

    Level 1 makes files a third larger than the default and takes a fifth of the time. What was
    encoded is kept while the picture lives, which nobody changes: the judge and the record see the
    same bytes.
    """
    key = id(image)
    known = _encoded.get(key)
    if known is not None and known[0]() is image:
        return known[1]
    bare = over_white(image)
    bare.info.clear()
    buffer = io.BytesIO()
    bare.save(buffer, format="PNG", compress_level=1)
    data = buffer.getvalue()
    _encoded[key] = ref(image, lambda _: _encoded.pop(key, None)), data
    return data
