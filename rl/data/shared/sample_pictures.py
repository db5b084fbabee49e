"""Opens pictures as users have them: a path, bytes, or a `datasets` image cell."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps, UnidentifiedImageError

from rl.config.loading import not_a_file
from rl.console import warn
from rl.files import downscale, open_picture, over_white
from rl.printing import excerpt

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
