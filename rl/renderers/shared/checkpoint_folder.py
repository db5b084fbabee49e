"""A diffusers checkpoint as it lies on disk: which parts are there."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rl.config.schema import missing_model


def side_problems(config: Any, multiple_px: int) -> list[str]:
    """Of `height_px` and `width_px`, where they are set."""
    sides = {key: getattr(config, key) for key in ("height_px", "width_px")}
    return [
        f"{key}: {side} is not a multiple of {multiple_px}; try "
        f"{round(side / multiple_px) * multiple_px}"
        for key, side in sides.items()
        if side is not None and side % multiple_px
    ]


def path_problems(model_path: str, files: Iterable[str]) -> list[str]:
    """What is wrong with a checkpoint's path, [] when it looks sound: a folder must hold `files`; a
    hub id 'owner/name' is taken on trust."""
    folder = Path(model_path)
    if not folder.is_dir():
        return missing_model("model_path", model_path)
    missing = [file for file in files if not (folder / file).is_file()]
    return [f"model_path: {model_path} lacks {', '.join(missing)}"] if missing else []
