"""Writes small pictures of every training group, within one budget of bytes per run."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path
from statistics import pstdev
from typing import NamedTuple

from PIL.Image import Image, new

from rl.api.types import Episode, Status
from rl.files import downscale, over_white, write_atomically
from rl.ranks.dist import Dist

LEVELS = ((256, 80), (208, 77), (168, 74), (136, 71), (112, 68), (88, 60), (72, 45))
"""(longest side of a picture in px, WebP quality), tried in order until a group fits its share."""
BASE_WEIGHT = 0.25
"""A group's share of the bytes is proportional to this plus its `interest`."""
_MARGIN = 1.5
"""A level is skipped if the last sheet's bytes per px predict more than this times the share."""
_BLOCK_PX = 16
"""WebP's largest block: pictures start at multiples of it, so that none bleeds into another."""
_ROW_PX = 4096
"""Maximum width of a sheet; WebP's limit is 16,383."""
_FILE_NAME = re.compile(r"rank(\d+)_g\d{2,}\.webp")


class GroupPictures(NamedTuple):
    """What the sheet of group `g` of this rank is made of."""

    g: int
    pictures: Sequence[Image]
    """Distinct: sources, target, bare arm, and one per distinct completion."""
    interest: float


class Thumbnails:
    """One rank's sheets: `<run>/thumbnails/it_000012/rank0_g03.webp` has all pictures of a group.

    The budget is divided equally over ranks. An iteration may use the bytes left, divided
    by the iterations left. Groups get shares of that by `interest`, the most interesting first;
    bytes that a group does not use go to the next ones. A group whose share is too small for the
    smallest of `LEVELS` gets no sheet.
    """

    def __init__(self, run_dir: Path, budget_bytes: float, dist: Dist) -> None:
        self._folder = run_dir / "thumbnails"
        self._budget_bytes = budget_bytes / dist.world_size
        self._dist = dist
        self._free_bytes: float | None = None

    def write(
        self, iteration: int, groups: Sequence[GroupPictures], num_left: int
    ) -> dict[int, str]:
        """Write the sheets of an iteration. `num_left`: iterations still to write, including this
        one. Returns `id` of a picture -> its place, a path relative to the run folder with a media
        fragment (W3C): 'thumbnails/it_000012/rank0_g03.webp#xywh=0,0,96,64', in px."""
        if self._free_bytes is None:
            self._free_bytes = self._budget_bytes - self._used_bytes()
        budget_bytes = left_bytes = self._free_bytes / num_left
        left_weight = sum(BASE_WEIGHT + group.interest for group in groups)
        places: dict[int, str] = {}
        density = 0.0  # of the last sheet: bytes / (pictures * side_px^2)
        for group in sorted(groups, key=lambda group: -group.interest):
            weight = BASE_WEIGHT + group.interest
            share = left_bytes * weight / left_weight
            left_weight -= weight
            name = f"it_{iteration:06d}/rank{self._dist.rank}_g{group.g:02d}.webp"
            pictures = group.pictures
            for side, quality in LEVELS if pictures else ():
                is_last = side == LEVELS[-1][0]
                if density * len(pictures) * side**2 > _MARGIN * share and not is_last:
                    continue
                pictures = [downscale(over_white(picture), side) for picture in pictures]
                data, boxes = _sheet(pictures, quality)
                density = len(data) / len(pictures) / side**2
                if len(data) <= share:
                    write_atomically(self._folder / name, data, durable=False)
                    left_bytes -= len(data)
                    for picture, box in zip(group.pictures, boxes, strict=True):
                        places[id(picture)] = f"thumbnails/{name}#xywh={box}"
                    break
        self._free_bytes -= budget_bytes - left_bytes  # after the writes, which are retried
        return places

    def _used_bytes(self) -> int:
        """Bytes of earlier starts' sheets that count for this rank, at this number of ranks."""
        return sum(
            path.stat().st_size
            for path in self._folder.glob("it_*/*.webp")
            if (match := _FILE_NAME.fullmatch(path.name))
            and int(match[1]) % self._dist.world_size == self._dist.rank
        )


def interest(episodes_G: Sequence[Episode], bare: Episode | None) -> float:
    """How interesting a group is, 0..1: the largest of twice the standard deviation of its
    rewards; the share of completions that failed or were not graded; how far its mean reward is
    from the bare arm's; twice the standard deviation between the judge's readings of a picture."""
    rewards = [episode.reward for episode in episodes_G if episode.reward is not None]
    failed = sum(episode.status is not Status.SCORED for episode in episodes_G)
    values = [failed / max(1, len(episodes_G))]
    if rewards:
        values.append(2 * pstdev(rewards))
        if bare is not None and bare.reward is not None:
            values.append(abs(sum(rewards) / len(rewards) - bare.reward))
    variances = (v for episode in episodes_G for v in episode.judge_variances if v is not None)
    values.append(2 * max(variances, default=0.0) ** 0.5)
    return min(1.0, max(values))


def _sheet(pictures: Sequence[Image], quality: int) -> tuple[bytes, list[str]]:
    """(the pictures as one WebP, 'left,top,width,height' of each)."""
    side = max(max(picture.size) for picture in pictures)
    cell = -(-side // _BLOCK_PX) * _BLOCK_PX
    columns = min(len(pictures), _ROW_PX // cell)
    rows = -(-len(pictures) // columns)
    sheet = new("RGB", (columns * cell, rows * cell), "white")
    boxes = []
    for i, picture in enumerate(pictures):
        left, top = i % columns * cell, i // columns * cell
        sheet.paste(picture, (left, top))
        boxes.append(f"{left},{top},{picture.width},{picture.height}")
    encoded = io.BytesIO()
    sheet.save(encoded, "WEBP", quality=quality, method=2)  # method=4: 2x the time, 2 % fewer bytes
    return encoded.getvalue(), boxes
