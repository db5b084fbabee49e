"""Sends a run's metrics, tables and pictures to its trackers; drops a tracker that fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from PIL.Image import Image

from rl.api.types import Episode
from rl.config.schema import RunConfig, TrackingConfig
from rl.files.images import downscale
from rl.files.private import private_folder
from rl.ranks.dist import Dist
from rl.text.scrub import remember, scrub
from rl.trackers.tensorboard_page import TensorboardPage, open_tensorboard
from rl.trackers.tracker_page import BeforeAfter, Cell, ServicePage, Table, tried, with_main
from rl.trackers.trackio_page import open_trackio
from rl.trackers.wandb_page import open_wandb

Page = TensorboardPage | ServicePage

_TABLE_IMAGE_SIDE_PX = 384


class Tracker:
    """One page per tracker of the run. Only rank 0 has pages; on other ranks, calls do nothing."""

    def __init__(
        self, run_dir: Path, config: RunConfig, dist: Dist, config_as_written: Mapping[str, Any]
    ) -> None:
        """`config_as_written`: `RunRecord.config`, which has no secrets."""
        self._tracking = config.tracking
        for judge in config.judges:
            remember(judge.api_key_env)
        self._pages: list[Page] = []
        if not dist.is_main:
            return
        for open_page in (open_wandb, open_tensorboard, open_trackio):
            if (page := open_page(run_dir, config, config_as_written)) is not None:
                self._pages.append(page)
                private_folder(run_dir / page.name)  # the page holds completions

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        self._on_each("log", lambda page: page.log(iteration, with_main(metrics)))

    def log_before_after(self, compare: Callable[[], BeforeAfter | None]) -> None:
        """Log what `compare` returns; it is only called if there is a page."""
        found: list[BeforeAfter | None] = []
        if self._pages:
            tried("trackers", "before and after", lambda: found.append(compare()))
        if found and (compared := found[0]):
            self._on_each("before and after", lambda page: page.log_before_after(compared))

    def log_episodes(
        self,
        iteration: int,
        episodes_PG: Sequence[Sequence[Episode]],
        advantages_PG: Sequence[Sequence[float | None]],
    ) -> None:
        """Log a table of rank 0's first `images_per_iteration` episodes; not to TensorBoard, which
        has no tables."""
        every = self._tracking.log_episodes_every_n_iterations
        with_tables = [page for page in self._pages if isinstance(page, ServicePage)]
        if not with_tables or every == 0 or iteration % every != 0:
            return
        pairs = [
            (episode, advantage)
            for episodes_G, advantages_G in zip(episodes_PG, advantages_PG, strict=True)
            for episode, advantage in zip(episodes_G, advantages_G, strict=True)
        ][: self._tracking.images_per_iteration]
        if pairs:
            table = Table("episodes", iteration, *self._table(pairs))
            for page in with_tables:
                if not tried(page.name, "episode table", partial(page.log_table, table)):
                    self._pages.remove(page)

    def close(self, failed: bool = False) -> None:
        """Finish the pages; waits at most a minute for the upload of each."""
        self._on_each("end of its page", lambda page: page.close(failed))
        self._pages.clear()

    def _table(
        self, pairs: Sequence[tuple[Episode, float | None]]
    ) -> tuple[list[str], list[list[Cell]]]:
        """Columns and rows, with downscaled pictures and without secrets in the texts."""

        def picture(image: Image | None) -> Image | None:
            return image and downscale(image, _TABLE_IMAGE_SIDE_PX)

        parts = sorted({name for episode, _ in pairs for name in episode.parts})
        max_sources = max(1, *(len(episode.prompt.sample.sources) for episode, _ in pairs))
        columns = ["source", *(f"source {number}" for number in range(2, max_sources + 1))]
        columns += ["target", "rendered", "instruction", "completion", "status", "failure"]
        columns += ["reward", *parts, "advantage"]
        rows: list[list[Cell]] = []
        for episode, advantage in pairs:
            sample = episode.prompt.sample
            images = [*sample.sources, *[None] * (max_sources - len(sample.sources))]
            images += [sample.target, episode.image]
            texts = [sample.instruction, episode.action.text, episode.status.value]
            texts.append(episode.failure or "")
            numbers = [episode.reward, *map(episode.parts.get, parts), advantage]
            rows.append([*map(picture, images), *map(scrub, texts), *numbers])
        return columns, rows

    def _on_each(self, task: str, call: Callable[[Page], object]) -> None:
        self._pages = [page for page in self._pages if tried(page.name, task, partial(call, page))]


def not_installed(tracking: TrackingConfig) -> list[str]:
    """A message for each enabled tracker whose package is not installed."""
    packages_of: Mapping[str, tuple[bool, str]] = {
        "wandb": (tracking.wandb != "off", "'vlm-edit-rl[train]'"),
        "tensorboard": (tracking.tensorboard, "'vlm-edit-rl[tensorboard]'"),
        # trackio's requirements exclude the pinned Pillow, but trackio works with it.
        "trackio": (
            tracking.trackio,
            "'vlm-edit-rl[trackio]' && pip install --no-deps trackio==0.43.0",
        ),
    }
    return [
        f"tracking.{name}: the package {name!r} is not installed here, and the run goes on without "
        f"it: pip install {packages}"
        for name, (is_enabled, packages) in packages_of.items()
        if is_enabled and find_spec(name) is None
    ]
