"""Saves a run's finished iterations as checkpoints, and publishes them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from rl import build
from rl.algorithm.metrics import Metrics
from rl.console import PhaseTimer
from rl.ranks.dist import Dist
from rl.record.checkpoint import Checkpoints, ResumePoint
from rl.record.publish import model_card
from rl.record.run_record import BackgroundWriter
from rl.run.last_finished import LastFinished

_JOURNAL = re.compile(r"(?:.+\.)?(?:iteration|evaluation)_(\d{6,})\.rank\d+\.jsonl")


@dataclass(eq=False)
class Checkpointing:
    """Saves and publishes a run's checkpoints; every rank has one."""

    config: Mapping[str, Any]
    """The run's config, scrubbed of secrets, so that it may be published."""
    dist: Dist
    num_iterations: int
    checkpoints: Checkpoints
    writer: BackgroundWriter
    """Writes everything about an iteration in the background, in order."""
    last_finished: LastFinished
    last_save: Future[None] | None = None
    """The write of the last checkpoint that was queued for the writer."""

    def finish(self, done: int, metrics: Metrics) -> None:
        """Note that iteration `done` is applied and synced, so that it can be saved. Collective."""
        self.last_finished.note(done, self.dist.reduce(metrics))

    def save_if_due(self, done: int, timer: PhaseTimer) -> None:
        """Save a checkpoint at the configured interval and after the last iteration. Collective."""
        last = done == self.num_iterations
        if last or self.checkpoints.due(done):
            with timer.phase("checkpoint"):
                self.save(final=last)

    def save(self, final: bool = False) -> None:
        """Write the checkpoint of the last finished iteration, after that iteration's records.
        Unless `final`, a state held in memory is written while training continues. Collective."""
        held = self.last_finished.in_memory()
        if held is not None and not final:
            if not self.dist.is_main:
                return
            if self.last_save is not None:
                self.last_save.result()  # at most two states in memory, plus one being copied
            label = f"the checkpoint of iteration {held.iteration}"
            self.last_save = self.writer.put(label, partial(self._save_from_memory, held))
            return
        self.writer.drain()
        point = self.last_finished.read()
        if self.checkpoints.save(point, final=final) is not None and self.dist.is_main:
            self._delete_journals(self.last_finished.done)
        self.writer.flush()  # last, so that an earlier error does not prevent the save

    def _save_from_memory(self, point: ResumePoint) -> None:
        if self.checkpoints.save_alone(point) is not None:
            self._delete_journals(point.iteration)

    def _delete_journals(self, done: int) -> None:
        """Delete journals of iterations before `done`: the episode records hold their replies."""
        for path in (self.checkpoints.folder.parent / "judge").glob("*.jsonl"):
            match = _JOURNAL.fullmatch(path.name)
            if match and int(match[1]) < done:
                path.unlink()

    def publish(self, done: int, metrics: Mapping[str, float], final: bool = False) -> None:
        """Write the model card of iteration `done`'s checkpoint, if there is one, and push it to
        the hub if a push is due. `metrics`: the last line of metrics written."""
        if self.dist.is_main:
            template = build.prompt_template(self.config)
            card = partial(model_card, self.config, done, metrics, template=template)
            final = final or done == self.num_iterations
            publish = partial(self.checkpoints.publish, done, card, final)
            self.writer.put(f"the model card of iteration {done}", publish)
