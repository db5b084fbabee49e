"""Training samples that share pictures, words or codes with held-out samples are recognized."""

from __future__ import annotations

from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from rl.api.types import Sample
from rl.run.checks import HeldOutContents


def scene(seed: int, size: tuple[int, int] = (96, 64)) -> Image.Image:
    """A picture of smooth blobs, like a photograph; each seed gives another one."""
    generator = np.random.default_rng(seed)
    small = Image.fromarray(generator.integers(0, 255, (6, 9, 3), dtype=np.uint8))
    return small.resize(size, Image.Resampling.BICUBIC)


def jpeg(picture: Image.Image, quality: int) -> Image.Image:
    file = BytesIO()
    picture.save(file, "JPEG", quality=quality)
    return Image.open(file).convert("RGB")


def plain(grey: int, size: tuple[int, int] = (4, 2)) -> Image.Image:
    return Image.new("RGB", size, (grey, grey, grey))


CODES = np.arange(4, dtype=np.int32).reshape(2, 2)
HELD_OUT = [
    Sample("h0", "paint it", sources=(plain(7),)),
    Sample("h1", "a red dog"),
    Sample("h2", "turn it", source_codes=CODES),
    Sample("h3", "join them", sources=(scene(1), scene(2))),
]


@pytest.mark.parametrize(
    ("sample", "held_out"),
    [
        (Sample("other words", "erase it", sources=(plain(7),)), "h0"),
        (Sample("other picture", "paint it", sources=(plain(8),)), None),
        (Sample("other shape", "paint it", sources=(plain(7, (2, 4)),)), None),
        (Sample("same words", "a red dog"), "h1"),
        (Sample("other case and spaces", " A  Red dog"), "h1"),
        (Sample("other prompt", "a red cat"), None),
        (Sample("same codes", "x", source_codes=CODES.astype(np.int64)), "h2"),
        (Sample("other grid", "turn it", source_codes=CODES.reshape(1, 4)), None),
        (Sample("first of two", "join them", sources=(scene(1),)), "h3"),
        (Sample("second of two", "join them", sources=(scene(2),)), "h3"),
        (Sample("other order", "join them", sources=(scene(2), scene(1))), "h3"),
        (Sample("another second", "join them", sources=(scene(1), scene(5))), "h3"),
        (Sample("another first", "join them", sources=(scene(5), scene(2))), "h3"),
        (Sample("others", "join them", sources=(scene(5), scene(6))), None),
        (Sample("JPEG copy", "x", sources=(jpeg(scene(1), 75),)), "h3"),
        (Sample("bad JPEG copy", "x", sources=(jpeg(scene(1), 40),)), "h3"),
        (Sample("resized copy", "x", sources=(scene(1).resize((70, 47)),)), "h3"),
        (Sample("enlarged JPEG", "x", sources=(jpeg(scene(1).resize((960, 640)), 75),)), "h3"),
        (Sample("stretched", "x", sources=(scene(1).resize((64, 96)),)), None),
        (Sample("mirrored", "x", sources=(scene(1).transpose(0),)), None),
    ],
    ids=lambda value: getattr(value, "id", None),
)
def test_a_training_sample_that_shares_contents_with_a_held_out_one_is_recognized(
    sample: Sample, held_out: str | None
) -> None:
    expected = {} if held_out is None else {sample.id: held_out}
    assert HeldOutContents(HELD_OUT).shared([sample]) == expected
    assert HeldOutContents([]).shared([sample]) == {}
