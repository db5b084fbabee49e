"""What a run watches over iterations, by hand."""

from __future__ import annotations

import numpy as np
from PIL import Image
from tiny_messages import names

from rl.api.types import Sample
from rl.run.watch import DEAD_WINDOW, DeadGroups, HeldOutContents


def test_dead_groups_are_said_when_they_begin_and_not_again_until_it_was_better() -> None:
    groups = DeadGroups()
    early = [groups.add(1.0) for _ in range(DEAD_WINDOW - 1)]
    assert early == [None] * (DEAD_WINDOW - 1), "a few iterations are no trend"
    first = groups.add(0.0)
    assert names(first, "90% of the groups ... 10 iterations")
    assert [groups.add(0.5) for _ in range(3)] == [None] * 3, "said once"
    better = [groups.add(0.0) for _ in range(DEAD_WINDOW)]
    assert better == [None] * DEAD_WINDOW
    again = [groups.add(0.6) for _ in range(5)]
    assert again[:4] == [None] * 4 and again[4] is not None, "a mean of 0.24, then of 0.3"


def test_healthy_groups_are_never_said() -> None:
    groups = DeadGroups()
    assert not any(groups.add(0.25) for _ in range(50))


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
