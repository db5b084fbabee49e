"""Pictures before and after training, and what was learnt, for trackers."""

from __future__ import annotations

import pytest
from PIL import Image
from tiny_report import held_out, write_held_out

from rl.run.run import MAX_PICTURES, before_after


def test_the_last_evaluation_is_compared_with_the_first(tmp_path):
    old = [held_out(i, 0.25) for i in range(12)]
    new = [held_out(i, 0.25 + 0.5 * (i % 2), completion="better") for i in range(11)]
    new += [held_out(11, None), held_out(99, 1.0)]
    for iteration, records, colour in ((0, old, "blue"), (4, new, "red")):
        folder = write_held_out(tmp_path, iteration, records)
        for kind in ("source", "image"):
            Image.new("RGB", (512, 256), colour).save(folder / f"{kind}.png")
    compared = before_after(tmp_path, 4)
    assert compared is not None
    # Samples 0 to 10: five gain 0.5, six gain nothing; the others were not graded both times.
    summary = dict(compared.summary)
    text = str(summary.pop("learnt"))
    assert text.startswith("held-out reward after 4 iterations: 0.250 -> 0.477 (+0.227, 95 % +0.")
    assert text.endswith(", 11 samples)")
    learnt = {"learnt/before": 0.25, "learnt/after": 0.25 + 2.5 / 11, "learnt/gain": 2.5 / 11}
    assert summary == pytest.approx(learnt)
    assert len(compared.pictures) == MAX_PICTURES
    caption, sheet = compared.pictures[1]
    assert caption == "ask 1 | before (0.25): write 1 | after (0.75): better"
    assert sheet.size == (3 * 256, 128)
    colours = [sheet.getpixel((128 + 256 * place, 64)) for place in range(3)]
    assert colours == [(0, 0, 255), (0, 0, 255), (255, 0, 0)], "source, before, after"


def test_without_two_evaluations_there_is_nothing_to_compare(tmp_path):
    assert before_after(tmp_path, 0) is None
    write_held_out(tmp_path, 4, [held_out(0, 1.0)])
    assert before_after(tmp_path, 4) is None
