"""Pictures of all usual formats and modes are read as RGB; unusable ones are refused."""

from __future__ import annotations

import io
import struct
import zlib
from contextlib import suppress

import numpy as np
import pytest
from PIL import EpsImagePlugin, Image, ImageCms
from tiny_edits import PHOTO_SIZE, save_photos

from rl import files
from rl.data.rows import UnusableError, check_header, decode, load_image, locate


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def pixel(data: bytes, at: tuple[int, int] = (8, 8)) -> tuple[int, ...]:
    image = decode(data, 8192)
    assert image.mode == "RGB"
    return image.getpixel(at)


@pytest.fixture(scope="module")
def photo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos")
    save_photos(folder)
    return folder / "china.jpg"


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", "YCbCr"])
def test_other_modes_become_rgb(mode):
    image = Image.new("RGB", (16, 16), "white").convert(mode)
    kind = "JPEG" if mode in ("CMYK", "YCbCr") else "PNG"
    assert pixel(encoded(image, kind)) == (255, 255, 255)


def test_transparent_pictures_are_laid_on_white():
    clear_red = Image.new("RGBA", (16, 16), (255, 0, 0, 0))
    half_black = Image.new("LA", (16, 16), (0, 128))
    assert pixel(encoded(clear_red)) == (255, 255, 255)
    assert pixel(encoded(half_black)) == (127, 127, 127)
    palette = Image.new("P", (16, 16), 0)
    palette.putpalette([10, 20, 30])
    assert pixel(encoded(palette, transparency=0)) == (255, 255, 255)
    assert pixel(encoded(palette)) == (10, 20, 30)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA"])
def test_transparency_is_kept_on_request(mode):
    image = Image.new("RGBA", (16, 16), (200, 200, 200, 128)).convert(mode)
    for kept in (
        decode(encoded(image, "TIFF" if mode == "PA" else "PNG"), 8192, True),
        load_image(image, 8192, True),
    ):
        assert kept.mode == "RGBA" and kept.getpixel((8, 8)) == (200, 200, 200, 128)
    assert decode(encoded(image.convert("RGB")), 8192, True).mode == "RGB"


@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
def test_greys_of_more_than_8_bits_are_refused(dtype):
    ramp = np.linspace(0, 65535, 256, dtype=dtype).reshape(16, 16)
    with pytest.raises(UnusableError, match="white is unknown; save it as 8-bit PNG"):
        check_header(encoded(Image.fromarray(ramp), "TIFF"), 8192)


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

    text = b"Adobe RGB"
    tags = {name: b"XYZ \0\0\0\0" + fixed(*values) for name, values in ADOBE_RGB.items()}
    curve = b"curv" + struct.pack(">IIH", 0, 1, round(GAMMA * 256)) + b"\0\0"
    tags |= dict.fromkeys((b"rTRC", b"gTRC", b"bTRC"), curve)
    tags[b"desc"] = b"desc\0\0\0\0" + struct.pack(">I", len(text) + 1) + text + b"\0" * 81
    tags[b"cprt"] = b"text\0\0\0\0none\0\0\0\0"
    offset = 132 + 12 * len(tags)
    table, data = struct.pack(">I", len(tags)), b""
    for name, value in tags.items():
        value += b"\0" * (-len(value) % 4)
        table += name + struct.pack(">II", offset + len(data), len(value))
        data += value
    size = 132 + 12 * len(tags) + len(data)
    header = struct.pack(">I4sI4s4s4s", size, b"lcms", 0x02100000, b"mntr", b"RGB ", b"XYZ ")
    header += struct.pack(">6H4s", 2026, 1, 1, 0, 0, 0, b"acsp") + b"\0" * 28
    return (header + fixed(0.9642, 1.0, 0.8249)).ljust(128, b"\0") + table + data


def shown(pixel: tuple[int, int, int]) -> np.ndarray:
    """What a viewer shows of an Adobe RGB pixel: 8-bit sRGB, by the two standards' formulas."""
    matrix = np.array([ADOBE_RGB[name] for name in (b"rXYZ", b"gXYZ", b"bXYZ")]).T
    linear = np.linalg.solve(SRGB_TO_XYZ, matrix @ (np.array(pixel) / 255) ** GAMMA).clip(0, 1)
    return 255 * np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P"])
@pytest.mark.parametrize("pixel", [(55, 98, 140), (200, 30, 60), (128, 128, 128), (10, 250, 90)])
def test_a_colour_profile_is_converted_to_srgb(mode: str, pixel: tuple[int, int, int]):
    picture = Image.new("RGB", (16, 16), pixel)
    picture = picture.quantize() if mode == "P" else picture.convert(mode)
    decoded = decode(encoded(picture, "PNG", icc_profile=adobe_rgb_profile()), 8192)
    assert decoded.mode == "RGB"
    assert np.abs(np.array(decoded.getpixel((0, 0))) - shown(pixel)).max() <= 1.5


def test_transparency_survives_a_colour_profile():
    clear = Image.new("RGBA", (16, 16), (55, 98, 140, 0))
    data = encoded(clear, "PNG", icc_profile=adobe_rgb_profile())
    assert decode(data, 8192).getpixel((0, 0)) == (255, 255, 255)
    assert decode(data, 8192, keeps_transparency=True).getpixel((0, 0))[3] == 0


def test_an_srgb_profile_and_a_broken_one_change_nothing():
    picture = Image.fromarray(np.arange(768, dtype=np.uint8).reshape(16, 16, 3))
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    for profile in (srgb, b"no profile", srgb[:200]):
        decoded = decode(encoded(picture, "PNG", icc_profile=profile), 8192)
        assert decoded.tobytes() == picture.tobytes()


def test_exif_rotation_is_applied():
    image = Image.new("RGB", (32, 16), "blue")
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: show it rotated by 90 degrees
    assert decode(encoded(image, "JPEG", exif=exif), 8192).size == (16, 32)


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
def test_an_animation_gives_its_first_frame(kind):
    frames = [Image.new("RGB", (16, 16), colour) for colour in ("lime", "red")]
    data = encoded(frames[0], kind, save_all=True, append_images=frames[1:])
    assert pixel(data)[1] > 200 > pixel(data)[0]


def test_absurd_sizes_are_refused_without_decoding():
    with pytest.raises(UnusableError, match=r"300x16 px; sides have 8 to 256 px"):
        check_header(encoded(Image.new("L", (300, 16))), 256)
    with pytest.raises(UnusableError, match=r"7x9 px; sides have 8 to"):
        check_header(encoded(Image.new("L", (7, 9))), 256)
    with pytest.raises(UnusableError, match=r"4000x16 px.* 200 times"):
        check_header(encoded(Image.new("L", (4000, 16))), 8192)
    check_header(encoded(Image.new("L", (256, 8))), 256)


def test_a_decompression_bomb_is_refused_from_its_header():
    header = struct.pack(">2I5B", 60000, 60000, 8, 2, 0, 0, 0)

    def chunk(kind: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"0"))
    for limit in (8192, 100_000):
        with pytest.raises(UnusableError, match="absurdly large"):
            check_header(bomb, limit)


@pytest.mark.parametrize("kind", ["WEBP", "GIF", "TIFF", "BMP"])
def test_a_small_file_of_many_pixels_is_refused_whatever_its_format(kind, monkeypatch):
    monkeypatch.setattr(files, "MAX_AREA_PX", 32 * 32)
    check_header(encoded(Image.new("L", (32, 32)), kind), 8192)
    with pytest.raises(UnusableError, match=r"absurdly large .33x32; .*downscale"):
        check_header(encoded(Image.new("L", (33, 32)), kind), 8192)


def test_no_picture_starts_a_program(tmp_path, monkeypatch):
    """Pillow runs Ghostscript for EPS; IPTC, ICO and ICNS may contain a picture of any format."""
    ran = tmp_path / "ran"
    gs = tmp_path / "gs"
    gs.write_text(f"#!/bin/sh\n: > {ran}\n")
    gs.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 64 64\n%%EndComments\nshowpage\n%%EOF\n"
    side = struct.pack(">I", 64)
    fields = [(3, 60, b"\1\0"), (3, 20, side), (3, 30, side), (3, 120, b"\0\0\0\5"), (8, 10, eps)]
    parts = [bytes([0x1C, *tag]) + struct.pack(">H", len(value)) + value for *tag, value in fields]
    iptc = b"".join(parts) + bytes(5)
    small = Image.new("RGB", (64, 64))
    others = [encoded(small, kind) for kind in ("ICO", "ICNS", "PCX")]
    for content in (eps, iptc, *others):
        file = tmp_path / "picture.png"
        file.write_bytes(content)
        for read in (lambda f: decode(f.read_bytes(), 8192), lambda f: load_image(str(f), 64)):
            with pytest.raises(UnusableError, match="save it as PNG"):
                read(file)
        with pytest.raises(OSError):
            files.open_picture(file)
    assert not ran.exists()
    with suppress(OSError), Image.open(io.BytesIO(iptc)) as picture:  # plain Pillow does run it
        picture.load()
    assert ran.exists()


def test_a_damaged_picture_is_refused(photo, tmp_path):
    whole = photo.read_bytes()
    truncated = tmp_path / "half.jpg"
    truncated.write_bytes(whole[: len(whole) // 2])
    for read in (check_header, decode):
        with pytest.raises(UnusableError, match=r"half.jpg .*truncated .*; replace"):
            read(truncated, 8192)
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    png = bytearray(encoded(Image.fromarray(noise)))
    png[len(png) // 2] ^= 0xFF
    with pytest.raises(UnusableError, match="corrupt or truncated"):
        decode(bytes(png), 8192)
    with pytest.raises(UnusableError, match=r"pointer of Git LFS, .* git lfs pull"):
        check_header(b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\n", 8192)
    for content in (b"<html>not found</html>", b"\0\0\0\x18ftypheic" + bytes(64)):
        with pytest.raises(UnusableError, match=r"none of PNG.* PNG or JPEG.*HEIC"):
            check_header(content, 8192)


def test_a_cell_may_hold_a_path_or_bytes(photo):
    folder = photo.parent
    assert locate("china.jpg", folder) == photo
    assert locate(str(photo), folder / "elsewhere") == photo
    assert locate({"bytes": b"x", "path": "gone.jpg"}, folder) == b"x"
    assert locate({"bytes": None, "path": "china.jpg"}, folder) == photo
    refused = {
        "gone.jpg": "does not exist; relative paths start at",
        "https://example.com/a.jpg": "is a URL .*; save it as a file",
        "": "not a picture; give a file path",
        None: "holds None, not a picture",
        3: "holds 3, not a picture",
    }
    for cell, message in refused.items():
        with pytest.raises(UnusableError, match=message):
            locate(cell, folder)


def test_a_users_picture_is_upright_and_no_larger_than_asked(photo, tmp_path):
    assert load_image(photo, 8192).size == PHOTO_SIZE
    turned = tmp_path / "turned.jpg"
    exif = Image.Exif()
    exif[0x112] = 6
    Image.open(photo).save(turned, exif=exif)
    small = load_image(str(turned), 128)
    assert max(small.size) == 128 and small.height > small.width
    same = load_image(Image.open(turned), 128)
    np.testing.assert_array_equal(np.asarray(same), np.asarray(small))
    clear = Image.new("RGBA", (16, 16), (255, 0, 0, 0))
    assert load_image(clear, 128).getpixel((3, 3)) == (255, 255, 255)
    with pytest.raises(UnusableError, match=r"nowhere\.png does not exist"):
        load_image("nowhere.png", 128)
