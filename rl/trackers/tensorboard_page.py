"""Writes TensorBoard event files to `<run>/tensorboard`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from PIL.Image import Image

from rl.config.schema import RunConfig
from rl.text.markdown import code, text
from rl.trackers.tracker_page import MAIN, MAX_CELL_CHARS, BeforeAfter, tried


class TensorboardPage:
    """Each start of a run opens a new file. Its `purge_step` hides what earlier starts logged from
    this step on, so that TensorBoard shows a repeated iteration once."""

    name = "tensorboard"

    def __init__(self, folder: Path, scrubbed: Mapping[str, Any]) -> None:
        self._folder, self._config = folder, scrubbed
        self._writer: Any = None

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        writer = self._writer_from(iteration)
        for name, value in metrics.items():
            writer.add_scalar(name, value, iteration)
        writer.flush()

    def log_before_after(self, compared: BeforeAfter) -> None:
        writer = self._writer_from(compared.iteration)
        for number, (caption, picture) in enumerate(compared.pictures):
            tag = f"{MAIN}before_after/{number}"
            self._add_picture(tag, picture, compared.iteration)
            writer.add_text(tag, text(caption, MAX_CELL_CHARS), compared.iteration)
        if learnt := compared.summary.get("learnt"):
            writer.add_text("learnt", text(str(learnt), MAX_CELL_CHARS), compared.iteration)

    def close(self, failed: bool) -> None:
        if self._writer is not None:
            self._writer.close()

    def _add_picture(self, tag: str, picture: Image, step: int) -> None:
        import numpy as np

        self._writer_from(step).add_image(tag, np.asarray(picture), step, dataformats="HWC")

    def _writer_from(self, step: int) -> Any:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), purge_step=step)
            self._writer.add_text("config", "\n".join(code(self._config)), step)
        return self._writer


def open_tensorboard(
    run_dir: Path, config: RunConfig, scrubbed: Mapping[str, Any]
) -> TensorboardPage | None:
    """None if tracking.tensorboard is off, or after a warning if the package is missing."""
    if not config.tracking.tensorboard:
        return None
    is_installed = tried("tensorboard", "import", lambda: import_module("tensorboard"))
    return TensorboardPage(run_dir / "tensorboard", scrubbed) if is_installed else None
