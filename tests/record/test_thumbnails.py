"""Small pictures of every group."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image
from tiny_loop import rows_of
from tiny_run import episode, record_in

from rl.files import open_picture
from rl.record.run_record import THUMBNAIL_PX


def cut_out(folder: Path, place: str) -> Image.Image:
    file, _, box = place.partition("#xywh=")
    left, top, width, height = map(int, box.split(","))
    with open_picture(folder / file, ("WEBP",)) as sheet:
        return sheet.convert("RGB").crop((left, top, left + width, top + height))


def test_every_distinct_picture_of_a_group_is_kept_once(tmp_path):
    noise = [
        Image.fromarray(pixels)
        for pixels in np.random.default_rng(0).integers(0, 255, (4, 200, 300, 3), dtype=np.uint8)
    ]
    # Two groups of three completions, two with the same picture.
    groups = [[episode(image=noise[n]) for n in (p, p, p + 1)] for p in (0, 2)]
    record = record_in(tmp_path, tracking={"images_per_iteration": 0})
    record.write_episodes(1, groups, [[0.0] * 3] * 2)
    rows = rows_of(tmp_path / "episodes/it_000001.rank0.jsonl")
    places = [row["thumbnail"] for row in rows]
    assert places[0] == places[1] and len(set(places)) == 4
    for row, picture in zip(rows[::3], noise[::2], strict=True):
        # WebP keeps the mean of noise; the longest side is `THUMBNAIL_PX`.
        thumbnail = cut_out(tmp_path, row["thumbnail"])
        assert thumbnail.size == (THUMBNAIL_PX, 85)
        means = [np.asarray(image).mean((0, 1)) for image in (thumbnail, picture)]
        assert np.abs(means[0] - means[1]).max() < 3
        source = cut_out(tmp_path, row["source_thumbnails"][0])
        assert source.size == (48, 32), "small pictures are not enlarged"
        assert np.abs(np.asarray(source)[4, 4] - (0.0, 0.0, 255.0)).max() < 30
