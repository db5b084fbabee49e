"""What samples show, by hand."""

from __future__ import annotations

import numpy as np
from PIL import Image

from rl.api.types import Sample
from rl.run.contents import HeldOutContents


def test_training_prompts_that_show_what_a_held_out_one_shows() -> None:
    def picture(grey: int, size: tuple[int, int] = (4, 2)) -> Image.Image:
        return Image.new("RGB", size, (grey, grey, grey))

    codes = np.arange(4, dtype=np.int32)
    held_out = HeldOutContents(
        [
            Sample("h0", "paint it", sources=(picture(7),)),
            Sample("h1", "a red dog"),
            Sample("h2", "turn it", source_codes=codes.reshape(2, 2)),
            Sample("h3", "join them", sources=(picture(1), picture(2))),
        ]
    )
    training = [
        Sample("other words", "erase it", sources=(picture(7),)),
        Sample("other picture", "paint it", sources=(picture(8),)),
        Sample("other shape", "paint it", sources=(picture(7, (2, 4)),)),
        Sample("same words", "a red dog"),
        Sample("other prompt", "a red cat"),
        Sample("same codes", "x", source_codes=codes.astype(np.int64).reshape(2, 2)),
        Sample("other grid", "turn it", source_codes=codes.reshape(1, 4)),
        Sample("first of two", "join them", sources=(picture(1),)),
    ]
    assert held_out.shared(training) == {
        "other words": "h0",
        "same words": "h1",
        "same codes": "h2",
    }
