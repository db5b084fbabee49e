"""Keeps the last finished iteration, and saves and publishes checkpoints, however the run ends."""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from rl import build
from rl.api.policy import Policy
from rl.check.memory_plan import HELD_STATE_GB
from rl.learner.learner import Learner
from rl.progress import PhaseTimer, warn
from rl.ranks.dist import Dist
from rl.record.checkpoint import Checkpoints, ResumePoint, find, iteration_of
from rl.record.publish import model_card
from rl.record.run_record import BackgroundWriter
from rl.seeds import rng_state

if TYPE_CHECKING:
    import torch

    State = tuple[dict[str, torch.Tensor], dict[str, Any]]

# ---- last finished -------------------------------------------------------------------------------
# Keeps the last finished iteration's state, so that it can be saved however the run ends.

TIMEOUT_S = 30.0
"""Limit for reporting to the other ranks that this rank ends, if it has saved alone."""
LONG_TIMEOUT_S = 1800.0
"""The same limit if the save needs all ranks, which may be waiting for the judge's replies."""


@dataclass(frozen=True, eq=False)
class Finished:
    done: int
    version: int
    """The learner's version at that time; if the learner's is higher now, its weights are of an
    unfinished iteration."""
    rng_by_rank: Sequence[Mapping[str, Any]]
    metrics: Mapping[str, float]
    """Reduced over all ranks; without held-out metrics, which are computed later."""
    state: State | None
    """`Learner.state()`; None if it is too large to keep in memory."""


class LastFinished:
    """An iteration is finished when its update is applied and synced. A small state (an adapter's)
    is kept in host memory, so that one rank can save it alone; to save a large one, all ranks read
    it from the device."""

    def __init__(self, learner: Learner, policy: Policy, config: Mapping[str, Any], dist: Dist):
        """`config`: scrubbed of secrets, so that it may be written anywhere."""
        self._learner = learner
        self._policy = policy
        self._config = config
        self._dist = dist
        self._keeps_state = learner.state_bytes <= HELD_STATE_GB * 1e9
        self.latest = Finished(0, learner.version, (), {}, None)

    def note(self, done: int, metrics: Mapping[str, float]) -> None:
        """Note that `done` iterations are applied and synced. Collective."""
        rng_by_rank = self._dist.gather(rng_state())
        state = self._learner.state(on_all_ranks=True) if self._keeps_state else None
        # A single assignment, because the signal handler's thread may read it at any time.
        self.latest = Finished(done, self._learner.version, rng_by_rank, metrics, state)

    def in_memory(self) -> ResumePoint | None:
        """The state in host memory; None before the first `note`, and if it is too large. Local."""
        finished = self.latest
        return None if finished.state is None else self._point(finished, finished.state)

    def is_live(self) -> bool:
        """Whether the live weights are still those of the last finished iteration. Local."""
        return self._learner.state_is_consistent and self.latest.version == self._learner.version

    def read(self) -> ResumePoint | None:
        """The state, of any size, on rank 0; None on others. Requires `is_live`, unless the state
        is in memory. Collective."""
        if (point := self.in_memory()) is not None:
            return point if self._dist.is_main else None
        assert self.is_live(), "the weights no longer belong to a finished iteration"
        state = self._learner.state()
        return self._point(self.latest, state) if self._dist.is_main else None

    def _point(self, finished: Finished, state: State) -> ResumePoint:
        tensors, learner_meta = state
        prefix = "master/"
        trained = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
        return ResumePoint(
            iteration=finished.done,
            tensors=tensors,
            meta={"learner": learner_meta, "config": self._config, "metrics": finished.metrics},
            rng_by_rank=finished.rng_by_rank,
            write_model=lambda folder: self._policy.save_pretrained(str(folder), trained),
            model_card=model_card(
                self._config,
                finished.done,
                finished.metrics,
                template=build.prompt_template(self._config),
            ),
        )


def save_at_once(last: LastFinished, checkpoints: Checkpoints) -> None:
    """Save the last finished iteration alone, on a signal, outside the main thread."""
    try:
        if last.latest.done and (held := last.in_memory()):
            checkpoints.save_alone(held)
    except Exception as error:
        warn(f"the finished iterations could not be saved at once: {error!r}")


def save_before_leaving(
    last: LastFinished, checkpoints: Checkpoints, dist: Dist, error: BaseException
) -> None:
    """Save the last finished iteration: this rank alone if it holds the state, else all ranks
    together if all respond. Saves nothing before the first one is finished, because a checkpoint
    would forbid config changes. Never raises: the user must see the error that ended the run."""
    try:
        held = last.in_memory() if last.latest.done else None
        if held is not None:
            checkpoints.save_alone(held)
        received = dist.report_error(error, TIMEOUT_S if held else LONG_TIMEOUT_S)
        if held is not None or not last.latest.done:
            return
        if received and dist.gather(last.is_live()) == [True] * dist.world_size:
            # Frees the autograd graphs in the failed frames' locals, to have memory for the gather.
            traceback.clear_frames(error.__traceback__)
            checkpoints.save(last.read())
            return
        newest = find(checkpoints.folder.parent, hashes=False).path
        on_disk = 0 if newest is None else iteration_of(newest)
        if on_disk < last.latest.done and (dist.is_main or not received):
            lost = f"the iterations after {on_disk}, up to {last.latest.done}, are lost"
            why = "a later update began" if received else "a rank with part of the state is gone"
            warn(f"{lost} ({why}); newest checkpoint: {newest or 'none'}")
    except BaseException as save_error:  # a policy of the user's may raise anything
        warn(f"the finished iterations could not be saved: {save_error!r}")


# ---- checkpointing -------------------------------------------------------------------------------
# Saves a run's finished iterations as checkpoints, and publishes them.

# A journal's file name, `[<judge>.]iteration_000012.rank0.jsonl`; group 1 is the iteration.
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
            self._delete_journals(self.last_finished.latest.done)
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
