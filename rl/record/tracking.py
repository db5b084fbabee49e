"""Hands a run's metrics, tables and pictures to its trackers; one that fails is given up."""

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
from rl.record.console import ClosingRow, PhaseTimer
from rl.record.scrub import remember, scrub
from rl.record.trackers import tensorboard_page, trackio_page, wandb_page
from rl.record.trackers.page import Cell, Page, tried
from rl.record.trackers.wandb_page import WandbPage

_TABLE_IMAGE_SIDE_PX = 384


class Tracker:
    """One page per run name and tracker. Local: only rank 0 has pages, the others' calls do
    nothing."""

    def __init__(
        self, run_dir: Path, config: RunConfig, dist: Dist, config_as_written: Mapping[str, Any]
    ) -> None:
        """`config_as_written`: `RunRecord.config`, which is scrubbed."""
        self._tracking = config.tracking
        remember(config.judge.api_key_env)
        self._pages: list[Page] = []
        if not dist.is_main:
            return
        for tracker in (wandb_page, tensorboard_page, trackio_page):
            if (page := tracker.open_page(run_dir, config, config_as_written)) is not None:
                self._pages.append(page)
                private_folder(run_dir / page.name)  # it holds completions

    @property
    def mode(self) -> wandb_page.Mode:
        """What became of `tracking.wandb`: 'online', 'offline' or 'off'."""
        return next((page.mode for page in self._pages if isinstance(page, WandbPage)), "off")

    def log(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Scalars under their stable names."""
        self._on_each("log", lambda page: page.log(iteration, metrics))

    def log_episodes(
        self,
        iteration: int,
        episodes_PG: Sequence[Sequence[Episode]],
        advantages_PG: Sequence[Sequence[float | None]],
    ) -> None:
        """A table of rank 0's first `images_per_iteration` episodes: sources, reference edit,
        rendered, instruction, completion, reward and its parts, advantage."""
        every = self._tracking.log_episodes_every_n_iterations
        if not self._pages or every == 0 or iteration % every != 0:
            return
        pairs = [
            (episode, advantage)
            for episodes_G, advantages_G in zip(episodes_PG, advantages_PG, strict=True)
            for episode, advantage in zip(episodes_G, advantages_G, strict=True)
        ][: self._tracking.images_per_iteration]
        if pairs:
            columns, rows = self._table(pairs)
            self._on_each(
                "episode table", lambda page: page.log_table("episodes", iteration, columns, rows)
            )

    def log_where_time_went(self, timer: PhaseTimer) -> None:
        """The closing table of this process, as the console prints it."""
        rows: list[list[Cell]] = [[*row] for row in timer.closing_rows()]
        columns = list(ClosingRow._fields)
        self._on_each(
            "closing table", lambda page: page.log_table("where_time_went", None, columns, rows)
        )

    def close(self, failed: bool = False) -> None:
        """Finish the pages, waiting at most a minute for each that is not uploaded yet."""
        self._on_each("end of its page", lambda page: page.close(failed))
        self._pages.clear()

    def _table(
        self, pairs: Sequence[tuple[Episode, float | None]]
    ) -> tuple[list[str], list[list[Cell]]]:
        """Columns and rows, their pictures small, their words without keys."""

        def picture(image: Image | None) -> Image | None:
            return image and downscale(image, _TABLE_IMAGE_SIDE_PX)

        parts = sorted({name for episode, _ in pairs for name in episode.parts})
        words = ("instruction", "completion", "status", "failure")
        most = max(1, *(len(episode.prompt.sample.sources) for episode, _ in pairs))
        sources = ["source", *(f"source {number}" for number in range(2, most + 1))]
        columns = [*sources, "target", "rendered", *words, "reward", *parts, "advantage"]
        rows: list[list[Cell]] = [
            [
                *(picture(s) for s in (*episode.prompt.sample.sources, *[None] * most)[:most]),
                picture(episode.prompt.sample.target),
                picture(episode.image),
                scrub(episode.prompt.sample.instruction),
                scrub(episode.action.text),
                episode.status.value,
                scrub(episode.failure or ""),
                episode.reward,
                *(episode.parts.get(name) for name in parts),
                advantage,
            ]
            for episode, advantage in pairs
        ]
        return columns, rows

    def _on_each(self, what: str, call: Callable[[Page], object]) -> None:
        """A page that fails is given up."""
        self._pages = [page for page in self._pages if tried(page.name, what, partial(call, page))]


def not_installed(tracking: TrackingConfig) -> list[str]:
    """A sentence for each tracker that is named and whose package is not there."""
    tracked: Mapping[str, tuple[bool, str]] = {
        "wandb": (tracking.wandb != "off", "'vlm-edit-rl[train]'"),
        "tensorboard": (tracking.tensorboard, "'vlm-edit-rl[tensorboard]'"),
        # The package refuses the pinned Pillow, with which it works.
        "trackio": (
            tracking.trackio,
            "'vlm-edit-rl[trackio]' && pip install --no-deps trackio==0.43.0",
        ),
    }
    return [
        f"tracking.{name}: the package {name!r} is not installed here, and the run goes on without "
        f"it: pip install {packages}"
        for name, (is_wanted, packages) in tracked.items()
        if is_wanted and find_spec(name) is None
    ]
