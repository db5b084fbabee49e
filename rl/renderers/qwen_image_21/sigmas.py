"""The noise levels that a few-step checkpoint states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl.files.atomic import row_of
from rl.renderers.qwen_image_21.qwen_image_21_config import Config

INDEX = "model_index.json"
KEY = "sample_sigmas"


def of_folder(config: Config) -> Sequence[float] | None:
    """What a local folder states; None for a hub id, or where it states none."""
    file = Path(config.model_path, INDEX)
    return of_index(row_of(file.read_bytes()) or {}) if file.is_file() else None


def of_index(index: Mapping[str, Any]) -> Sequence[float] | None:
    """Raises ValueError where what it states are no levels."""
    stated = index.get(KEY)
    if stated is None:
        return None
    if not isinstance(stated, list) or not all(
        isinstance(level, int | float) and 0 < level <= 1 for level in stated
    ):
        raise ValueError(f"{INDEX}: {KEY} is no list of numbers in (0, 1]")
    return tuple(float(level) for level in stated)


def wrong_steps(config: Config, levels: Sequence[float] | None) -> str:
    """What is wrong with `num_steps` under these levels; '' when nothing is."""
    if levels is None or len(levels) == config.num_steps:
        return ""
    whose = "sigmas are" if config.sigmas is not None else f"the checkpoint's {KEY} are"
    return f"num_steps: {config.num_steps}, but {whose} {len(levels)}; set num_steps: {len(levels)}"
