"""Small pictures of every group, within one budget per run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tiny_run import episode, run_config

from rl.api.types import Episode
from rl.files import open_picture
from rl.ranks.dist import Dist
from rl.record.run_record import SIDES_PX, RunRecord

MB = 1e6


def noise(seed: int, width: int = 300, height: int = 200) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def record_in(folder: Path, budget_bytes: float, dist: Dist | None = None) -> RunRecord:
    config = run_config(tracking={"thumbnails_mb": budget_bytes / MB, "images_per_iteration": 0})
    return RunRecord(folder, config, dist or Dist())


def groups_of(num: int) -> list[list[Episode]]:
    """`num` groups of three completions, two with the same picture."""
    groups = []
    for p in range(num):
        shared, other = noise(10 * p), noise(10 * p + 1)
        groups.append([episode(image=picture) for picture in (shared, shared, other)])
    return groups


def write(record: RunRecord, iteration: int, groups: list[list[Episode]], num_later: int) -> None:
    advantages = [[0.0] * len(group) for group in groups]
    record.write_episodes(iteration, groups, advantages, (), num_later)


def rows_of(folder: Path, iteration: int, rank: int = 0) -> list[dict]:
    path = folder / "episodes" / f"it_{iteration:06d}.rank{rank}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("thumbnails/*/*.webp"))


def cut_out(folder: Path, place: str) -> Image.Image:
    file, _, box = place.partition("#xywh=")
    left, top, width, height = map(int, box.split(","))
    with open_picture(folder / file, ("WEBP",)) as sheet:
        return sheet.convert("RGB").crop((left, top, left + width, top + height))


def test_every_distinct_picture_of_a_group_is_kept_once(tmp_path):
    write(record_in(tmp_path, 10 * MB), 1, groups_of(2), 0)
    rows = rows_of(tmp_path, 1)
    places = [row["thumbnail"] for row in rows]
    assert places[0] == places[1] and len(set(places)) == 4
    for row, picture in zip(rows[::3], (noise(0), noise(10)), strict=True):
        # WebP keeps the mean of noise; the longest side is the largest.
        thumbnail = cut_out(tmp_path, row["thumbnail"])
        assert thumbnail.size == (SIDES_PX[0], 171)
        means = [np.asarray(image).mean((0, 1)) for image in (thumbnail, picture)]
        assert np.abs(means[0] - means[1]).max() < 3
        source = cut_out(tmp_path, row["source_thumbnails"][0])
        assert source.size == (48, 32), "small pictures are not enlarged"
        assert np.abs(np.asarray(source)[4, 4] - (0.0, 0.0, 255.0)).max() < 30


@pytest.mark.parametrize("num_later", [0, 5])
def test_the_budget_is_kept_and_shared_by_iterations_and_groups(tmp_path, num_later):
    budget = 60_000 * (num_later + 1)
    record = record_in(tmp_path, budget)
    for iteration in range(num_later + 1):
        write(record, iteration, groups_of(4), num_later - iteration)
    assert 0.6 * budget < size_of(tmp_path) <= budget
    assert len(list(tmp_path.glob("thumbnails/*/rank0_g0?.webp"))) == 4 * (num_later + 1)


def test_a_resume_goes_on_with_the_bytes_that_are_left(tmp_path):
    """Also on two ranks: each counts its own files, so records do not depend on the restart."""
    for folder, restarts in ((tmp_path / "whole", False), (tmp_path / "resumed", True)):
        for rank in range(2):
            dist = Dist(rank=rank, world_size=2)
            record = record_in(folder, 150_000, dist)
            for iteration in range(1, 4):
                if restarts and iteration == 3:
                    record = record_in(folder, 150_000, dist)
                write(record, iteration, groups_of(3), 3 - iteration)
    for rank in range(2):
        whole, resumed = (rows_of(tmp_path / name, 3, rank) for name in ("whole", "resumed"))
        assert whole == resumed and any(row["thumbnail"] for row in whole)
    assert size_of(tmp_path / "whole") == size_of(tmp_path / "resumed") <= 150_000


def test_without_a_budget_there_are_no_thumbnails(tmp_path):
    write(record_in(tmp_path, 0), 1, groups_of(1), 0)
    assert rows_of(tmp_path, 1)[0]["thumbnail"] is None
    assert not (tmp_path / "thumbnails").exists()
