"""A picture is encoded once, for the judge and for the record."""

from __future__ import annotations

import base64
import io
import json
from collections import Counter
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_run import episode, run_config

from rl.api.types import RewardInput, Sample
from rl.files import digest, png_bytes
from rl.judge.reply import picture_part
from rl.ranks.dist import Dist
from rl.record.run_record import RunRecord
from rl.rollout.episodes import own_copy


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, int]]:
    """Picture size -> how often a picture of this size was encoded."""
    sizes: Counter[tuple[int, int]] = Counter()
    save = Image.Image.save

    def counted(self: Image.Image, *args: Any, **kwargs: Any) -> None:
        sizes[self.size] += 1
        save(self, *args, **kwargs)

    monkeypatch.setattr(Image.Image, "save", counted)
    return sizes


def sent(image: Image.Image, side_px: int) -> bytes:
    """The bytes that the judge gets for the picture."""
    url = json.loads(picture_part(image, side_px))["image_url"]["url"]
    return base64.b64decode(url.removeprefix("data:image/png;base64,"))


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "P", "CMYK"])
def test_the_record_writes_the_bytes_that_the_judge_got(
    tmp_path: Path, encoded: Counter[tuple[int, int]], mode: str
) -> None:
    image = Image.effect_noise((40, 30), 60).convert(mode)
    judge_bytes = [sent(deepcopy(image), 40) for _ in range(2)][-1]
    RunRecord(tmp_path, run_config(), Dist()).write_episodes(1, [[episode(image=image)]], [[1.0]])
    assert (tmp_path / "images/it_000001/rank0_g00_m0.png").read_bytes() == judge_bytes
    assert encoded[40, 30] == 1
    assert Image.open(io.BytesIO(judge_bytes)).tobytes() == image.convert("RGB").tobytes()


def test_a_digest_tells_pictures_apart() -> None:
    grey, tall = (Image.new("L", size, 7) for size in ((4, 6), (6, 4)))
    palette = Image.new("P", (4, 6), 7)
    recoloured, drawn_on, see_through = palette.copy(), grey.copy(), grey.copy()
    recoloured.putpalette([9] * 768)
    drawn_on.putpixel((1, 1), 8)
    see_through.info["transparency"] = 7
    all_of_them = [grey, tall, palette, recoloured, drawn_on, see_through, grey.convert("RGB")]
    assert len({digest(picture) for picture in all_of_them}) == 7
    assert digest(grey) == digest(deepcopy(grey))


def test_who_gets_pictures_can_change_only_copies() -> None:
    image, codes = Image.new("RGB", (8, 8), "white"), np.zeros((2, 2), np.int32)
    hidden = {"boxes": [image, (1, 2)], "scores": torch.zeros(2), "labels": {"red"}}
    sample = Sample("a", "x", (image,), image, codes, hidden=hidden)
    copy = own_copy(RewardInput(sample, "x", image))
    boxes = copy.sample.hidden["boxes"]
    assert boxes == [image, (1, 2)]
    for picture in (copy.image, copy.sample.target, *copy.sample.sources, boxes[0]):
        picture.putpixel((0, 0), (0, 0, 0))
    boxes.clear()
    copy.sample.hidden["labels"].clear()
    copy.sample.hidden["scores"][0] = copy.sample.source_codes[0, 0] = 5
    assert image.getcolors() == [(64, (255, 255, 255))]
    assert codes.sum() == hidden["scores"].sum() == 0
    assert (hidden["boxes"], hidden["labels"]) == ([image, (1, 2)], {"red"})


def test_a_transparent_picture_is_sent_over_white() -> None:
    """Half-transparent red over white, for record and judge alike, scaled or not."""
    half = Image.new("RGBA", (64, 64), (255, 0, 0, 128))
    for data in (png_bytes(half), sent(half, 64), sent(half.copy(), 32)):
        assert Image.open(io.BytesIO(data)).getpixel((5, 5)) == (255, 127, 127)
