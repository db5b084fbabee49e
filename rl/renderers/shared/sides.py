"""Checks a picture's fixed height and width."""

from __future__ import annotations

from typing import Any


def side_problems(config: Any, multiple_px: int) -> list[str]:
    """What is wrong with `height_px` and `width_px`, where they are set."""
    sides = {key: getattr(config, key) for key in ("height_px", "width_px")}
    return [
        f"{key}: {side} is not a multiple of {multiple_px}; try "
        f"{round(side / multiple_px) * multiple_px}"
        for key, side in sides.items()
        if side is not None and side % multiple_px
    ]
