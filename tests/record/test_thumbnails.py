"""Small pictures of every group."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from PIL import Image
from tiny_run import episode, run_config

from rl.api.types import Episode
from rl.files import open_picture
from rl.ranks.dist import Dist
from rl.record.run_record import THUMBNAIL_PX, RunRecord


def noise(seed: int, width: int = 300, height: int = 200) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def groups_of(num: int) -> list[list[Episode]]:
    """`num` groups of three completions, two with the same picture."""
    groups = []
    for p in range(num):
        shared, other = noise(10 * p), noise(10 * p + 1)
        groups.append([episode(image=picture) for picture in (shared, shared, other)])
    return groups


def rows_of(folder: Path, iteration: int, rank: int = 0) -> list[dict]:
    path = folder / "episodes" / f"it_{iteration:06d}.rank{rank}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def cut_out(folder: Path, place: str) -> Image.Image:
    file, _, box = place.partition("#xywh=")
    left, top, width, height = map(int, box.split(","))
    with open_picture(folder / file, ("WEBP",)) as sheet:
        return sheet.convert("RGB").crop((left, top, left + width, top + height))


def test_every_distinct_picture_of_a_group_is_kept_once(tmp_path):
    record = RunRecord(tmp_path, run_config(tracking={"images_per_iteration": 0}), Dist())
    record.write_episodes(1, groups_of(2), [[0.0] * 3] * 2)
    rows = rows_of(tmp_path, 1)
    places = [row["thumbnail"] for row in rows]
    assert places[0] == places[1] and len(set(places)) == 4
    for row, picture in zip(rows[::3], (noise(0), noise(10)), strict=True):
        # WebP keeps the mean of noise; the longest side is `THUMBNAIL_PX`.
        thumbnail = cut_out(tmp_path, row["thumbnail"])
        assert thumbnail.size == (THUMBNAIL_PX, 85)
        means = [np.asarray(image).mean((0, 1)) for image in (thumbnail, picture)]
        assert np.abs(means[0] - means[1]).max() < 3
        source = cut_out(tmp_path, row["source_thumbnails"][0])
        assert source.size == (48, 32), "small pictures are not enlarged"
        assert np.abs(np.asarray(source)[4, 4] - (0.0, 0.0, 255.0)).max() < 30
