"""Pictures of all usual formats and modes are read as RGB; unusable ones are refused."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest
from PIL import EpsImagePlugin, Image, ImageCms
from tiny_edits import PHOTO_SIZE, save_photos
from tiny_messages import holds

from rl import files
from rl.data.rows import UnusableError, check_header, decode, load_image, locate


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def pixel(data: bytes) -> tuple[int, ...]:
    """The one in the middle of 16 x 16."""
    image = decode(data, 8192)
    assert image.mode == "RGB"
    return image.getpixel((8, 8))


def filled(colour: object, mode: str = "RGB") -> Image.Image:
    return Image.new(mode, (16, 16), colour)


def turned() -> Image.Exif:
    """The camera was turned: the picture is shown rotated by 90 degrees."""
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


def refused(read: Callable[..., object], *arguments: object) -> str:
    with pytest.raises(UnusableError) as error:
        read(*arguments)
    return str(error.value)


@pytest.fixture(scope="module")
def photo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos")
    save_photos(folder)
    return folder / "china.jpg"


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", "YCbCr"])
def test_other_modes_become_rgb(mode):
    kind = "JPEG" if mode in ("CMYK", "YCbCr") else "PNG"
    assert pixel(encoded(filled("white").convert(mode), kind)) == (255, 255, 255)


def test_transparent_pictures_are_laid_on_white():
    assert pixel(encoded(filled((255, 0, 0, 0), "RGBA"))) == (255, 255, 255)
    assert pixel(encoded(filled((0, 128), "LA"))) == (127, 127, 127)
    palette = filled(0, "P")
    palette.putpalette([10, 20, 30])
    assert pixel(encoded(palette, transparency=0)) == (255, 255, 255)
    assert pixel(encoded(palette)) == (10, 20, 30)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA"])
def test_transparency_is_kept_on_request(mode):
    image = filled((200, 200, 200, 128), "RGBA").convert(mode)
    data = encoded(image, "TIFF" if mode == "PA" else "PNG")
    for kept in (decode(data, 8192, True), load_image(image, 8192, True)):
        assert kept.mode == "RGBA" and kept.getpixel((8, 8)) == (200, 200, 200, 128)
    assert decode(encoded(image.convert("RGB")), 8192, True).mode == "RGB"


@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
def test_greys_of_more_than_8_bits_are_refused(dtype):
    ramp = np.linspace(0, 65535, 256, dtype=dtype).reshape(16, 16)
    message = refused(check_header, encoded(Image.fromarray(ramp), "TIFF"), 8192)
    assert holds(message, "white is unknown; save it as 8-bit PNG")


ADOBE_RGB = {
    b"rXYZ": (0.60974, 0.31111, 0.01947), b"gXYZ": (0.20528, 0.62567, 0.06087),
    b"bXYZ": (0.14919, 0.06322, 0.74457), b"wtpt": (0.9642, 1.0, 0.8249),
}  # fmt: skip
"""Primaries and white, relative to D50 (Adobe RGB (1998) Color Image Encoding)."""
GAMMA = 2.19921875
SRGB_TO_XYZ = np.array(
    [[0.43607, 0.38515, 0.14307], [0.22249, 0.71687, 0.06061], [0.01392, 0.09708, 0.71410]]
)


def adobe_rgb_profile() -> bytes:
    """A minimal ICC profile (version 2.1, section 6 of ICC.1:1998-09)."""

    def fixed(*values: float) -> bytes:
        return struct.pack(f">{len(values)}i", *(round(value * 65536) for value in values))

    text = b"Adobe RGB\0"
    curve = b"curv" + struct.pack(">IIH", 0, 1, round(GAMMA * 256)) + b"\0\0"
    tags = {name: b"XYZ \0\0\0\0" + fixed(*values) for name, values in ADOBE_RGB.items()}
    tags |= dict.fromkeys((b"rTRC", b"gTRC", b"bTRC"), curve)
    tags[b"desc"] = b"desc\0\0\0\0" + struct.pack(">I", len(text)) + text + b"\0" * 80
    tags[b"cprt"] = b"text\0\0\0\0none\0\0\0\0"
    offset = 132 + 12 * len(tags)
    table, data = struct.pack(">I", len(tags)), b""
    for name, value in tags.items():
        table += name + struct.pack(">II", offset + len(data), len(value))
        data += value + b"\0" * (-len(value) % 4)
    size = offset + len(data)
    header = struct.pack(">I4sI4s4s4s", size, b"lcms", 0x02100000, b"mntr", b"RGB ", b"XYZ ")
    header += struct.pack(">6H4s", 2026, 1, 1, 0, 0, 0, b"acsp") + b"\0" * 28
    return (header + fixed(0.9642, 1.0, 0.8249)).ljust(128, b"\0") + table + data


def shown(pixel: tuple[int, int, int]) -> np.ndarray:
    """What a viewer shows of an Adobe RGB pixel: 8-bit sRGB, by the two standards' formulas."""
    matrix = np.array([ADOBE_RGB[name] for name in (b"rXYZ", b"gXYZ", b"bXYZ")]).T
    linear = np.linalg.solve(SRGB_TO_XYZ, matrix @ (np.array(pixel) / 255) ** GAMMA).clip(0, 1)
    return 255 * np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P"])
@pytest.mark.parametrize("colour", [(55, 98, 140), (200, 30, 60), (128, 128, 128), (10, 250, 90)])
def test_a_colour_profile_is_converted_to_srgb(mode: str, colour: tuple[int, int, int]):
    picture = filled(colour).quantize() if mode == "P" else filled(colour).convert(mode)
    decoded = pixel(encoded(picture, "PNG", icc_profile=adobe_rgb_profile()))
    assert np.abs(np.array(decoded) - shown(colour)).max() <= 1.5


def test_transparency_survives_a_colour_profile():
    data = encoded(filled((55, 98, 140, 0), "RGBA"), icc_profile=adobe_rgb_profile())
    assert pixel(data) == (255, 255, 255)
    assert decode(data, 8192, keeps_transparency=True).getpixel((0, 0))[3] == 0


def test_an_srgb_profile_and_a_broken_one_change_nothing():
    picture = Image.fromarray(np.arange(768, dtype=np.uint8).reshape(16, 16, 3))
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    for profile in (srgb, b"no profile", srgb[:200]):
        decoded = decode(encoded(picture, "PNG", icc_profile=profile), 8192)
        assert decoded.tobytes() == picture.tobytes()


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
def test_an_animation_gives_its_first_frame(kind):
    data = encoded(filled("lime"), kind, save_all=True, append_images=[filled("red")])
    assert pixel(data)[1] > 200 > pixel(data)[0]


def test_absurd_sizes_are_refused_without_decoding():
    for size, limit, message in (
        ((300, 16), 256, "300x16 px; sides have 8 to 256 px"),
        ((7, 9), 256, "7x9 px; sides have 8 to"),
        ((4000, 16), 8192, "4000x16 px ... 200 times"),
    ):
        assert holds(refused(check_header, encoded(Image.new("L", size)), limit), message)
    check_header(encoded(Image.new("L", (256, 8))), 256)


def test_a_decompression_bomb_is_refused_from_its_header():
    bomb = b"\x89PNG\r\n\x1a\n"
    header = b"IHDR" + struct.pack(">2I5B", 60000, 60000, 8, 2, 0, 0, 0)
    for chunk in (header, b"IDAT" + zlib.compress(b"0")):
        bomb += struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
    for limit in (8192, 100_000):
        assert "absurdly large" in refused(check_header, bomb, limit)


@pytest.mark.parametrize("kind", ["WEBP", "GIF", "TIFF", "BMP"])
def test_a_small_file_of_many_pixels_is_refused_whatever_its_format(kind, monkeypatch):
    monkeypatch.setattr(files, "MAX_AREA_PX", 32 * 32)
    check_header(encoded(Image.new("L", (32, 32)), kind), 8192)
    message = refused(check_header, encoded(Image.new("L", (33, 32)), kind), 8192)
    assert holds(message, "absurdly large (33x32; ... downscale")


def test_no_picture_starts_a_program(tmp_path, monkeypatch):
    """Pillow runs Ghostscript for EPS; IPTC, ICO and ICNS may contain a picture of any format."""
    ran, gs = tmp_path / "ran", tmp_path / "gs"
    gs.write_text(f"#!/bin/sh\n: > {ran}\n")
    gs.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 64 64\n%%EndComments\nshowpage\n%%EOF\n"
    side = struct.pack(">I", 64)
    fields = [(3, 60, b"\1\0"), (3, 20, side), (3, 30, side), (3, 120, b"\0\0\0\5"), (8, 10, eps)]
    parts = [bytes([0x1C, *tag]) + struct.pack(">H", len(value)) + value for *tag, value in fields]
    iptc = b"".join(parts) + bytes(5)
    others = [encoded(Image.new("RGB", (64, 64)), kind) for kind in ("ICO", "ICNS", "PCX")]
    file = tmp_path / "picture.png"
    for content in (eps, iptc, *others):
        file.write_bytes(content)
        assert "save it as PNG" in refused(decode, content, 8192)
        assert "save it as PNG" in refused(load_image, str(file), 64)
        with pytest.raises(OSError):
            files.open_picture(file)
    assert not ran.exists()
    with suppress(OSError), Image.open(io.BytesIO(iptc)) as picture:  # plain Pillow does run it
        picture.load()
    assert ran.exists()


def test_a_damaged_picture_is_refused(photo, tmp_path):
    whole, truncated = photo.read_bytes(), tmp_path / "half.jpg"
    truncated.write_bytes(whole[: len(whole) // 2])
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    png = bytearray(encoded(Image.fromarray(noise)))
    png[len(png) // 2] ^= 0xFF
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n"
    for read, content, message in (
        (check_header, truncated, "half.jpg ... truncated ... ; replace"),
        (decode, truncated, "half.jpg ... truncated ... ; replace"),
        (decode, bytes(png), "corrupt or truncated"),
        (check_header, pointer, "pointer of Git LFS, ... git lfs pull"),
        (check_header, b"<html>not found</html>", "none of PNG ... PNG or JPEG ... HEIC"),
        (check_header, b"\0\0\0\x18ftypheic" + bytes(64), "none of PNG ... PNG or JPEG ... HEIC"),
    ):
        assert holds(refused(read, content, 8192), message)


def test_a_cell_may_hold_a_path_or_bytes(photo):
    folder = photo.parent
    assert locate("china.jpg", folder) == photo
    assert locate(str(photo), folder / "elsewhere") == photo
    assert locate({"bytes": b"x", "path": "gone.jpg"}, folder) == b"x"
    assert locate({"bytes": None, "path": "china.jpg"}, folder) == photo
    messages = {
        "gone.jpg": "does not exist; relative paths start at",
        "https://example.com/a.jpg": "is a URL ... ; save it as a file",
        "": "not a picture; give a file path",
        None: "holds None, not a picture",
        3: "holds 3, not a picture",
    }
    for cell, message in messages.items():
        assert holds(refused(locate, cell, folder), message)


def test_a_users_picture_is_upright_and_no_larger_than_asked(photo, tmp_path):
    assert load_image(photo, 8192).size == PHOTO_SIZE
    file = tmp_path / "turned.jpg"
    Image.open(photo).save(file, exif=turned())
    small = load_image(str(file), 128)
    assert max(small.size) == 128 and small.height > small.width
    assert load_image(Image.open(file), 128).tobytes() == small.tobytes()
    assert load_image(filled((255, 0, 0, 0), "RGBA"), 128).getpixel((3, 3)) == (255, 255, 255)
    assert "nowhere.png does not exist" in refused(load_image, "nowhere.png", 128)
