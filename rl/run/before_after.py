"""Held-out pictures before and after training, and what was learnt, for a run's trackers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from PIL.Image import Image

from rl.files import downscale, open_picture, read_rows, side_by_side
from rl.printing import scrub
from rl.run.paired import interval
from rl.trackers import BeforeAfter

MAX_PICTURES = 8
_SIDE_PX = 256


def before_after(run_dir: Path, iteration: int) -> BeforeAfter | None:
    """The evaluation before training compared with that after `iteration`; None if one of them has
    no records. The same first samples every time, so that a tracker can step through them."""
    folders = [run_dir / "evaluation" / f"it_{it:06d}" for it in (0, iteration)]
    if iteration == 0 or not all((folder / "records.jsonl").is_file() for folder in folders):
        return None
    old, new = (read_rows(folder / "records.jsonl")[0] for folder in folders)
    row_of = {row["id"]: row for row in old}
    pairs = [(row_of[row["id"]], row) for row in new if row["id"] in row_of]
    pictures: list[tuple[str, Image]] = []
    for before, after in pairs:
        names = (before["source_file"], before["image_file"], after["image_file"])
        files = [f / (name or "") for f, name in zip((folders[0], *folders), names, strict=True)]
        if len(pictures) < MAX_PICTURES and files[1].is_file() and files[2].is_file():
            caption = (
                f"{after['instruction']} | before ({before['reward']}): {before['completion']} | "
                f"after ({after['reward']}): {after['completion']}"
            )
            found = [open_picture(file).convert("RGB") for file in files if file.is_file()]
            sheet = side_by_side([downscale(picture, _SIDE_PX) for picture in found])
            pictures.append((scrub(caption), sheet))
    return BeforeAfter(iteration, pictures, _summary(pairs, iteration))


def _summary(
    pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]], iteration: int
) -> dict[str, float | str]:
    graded = [(a, b) for a, b in pairs if a["reward"] is not None and b["reward"] is not None]
    if not graded:
        return {}
    first, last = (fmean(pair[i]["reward"] for pair in graded) for i in (0, 1))
    gains = [after["reward"] - before["reward"] for before, after in graded]
    ends = interval(gains, [before.get("shown") or [before["id"]] for before, _ in graded])
    gain, span = fmean(gains), f", 95 % {ends[0]:+.3f} to {ends[1]:+.3f}" if ends else ""
    sentence = (
        f"held-out reward after {iteration} iterations: {first:.3f} -> {last:.3f} "
        f"({gain:+.3f}{span}, {len(gains)} samples)"
    )
    return {"learnt": sentence, "learnt/before": first, "learnt/after": last, "learnt/gain": gain}
