"""A rollout without models: completions are letters, and pictures are grey levels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from PIL import Image
from tiny_run import run_config

from rl.api.reward import Reward
from rl.api.types import Completion, RenderFailure, RenderJob, RewardInput, Sample
from rl.learner.train_step import pack_groups
from rl.progress import PhaseTimer
from rl.ranks.dist import Dist
from rl.rollout.stream import Rollout, RolloutContext, Sampled, begin
from rl.run.run import Run


class Painter:
    """Draws the noise seed as a grey; fails at words in 'x...', blames the policy for 'y...'."""

    def __init__(self) -> None:
        self.jobs: list[RenderJob] = []

    def decode_sources(self, samples: Sequence[Sample]) -> list[Sample]:
        return list(samples)

    def take_metrics(self) -> dict[str, float]:
        return {"clip_cut_share": 0.5}

    def render(
        self, jobs: Iterable[RenderJob]
    ) -> Iterator[tuple[int, Image.Image | RenderFailure]]:
        all_jobs = list(jobs)
        self.jobs += all_jobs
        for index, job in reversed(list(enumerate(all_jobs))):
            if str(job.payload)[0] in "xy":
                blame = "policy" if job.payload[0] == "y" else "renderer"
                yield index, RenderFailure("ragged", blame)
            else:
                grey = (job.noise_seed % 256,) * 3
                yield index, Image.new("RGB", (1, 1), grey)


def word(text: str, finish: str = "stop", forced: tuple[bool, ...] | None = None) -> Completion:
    ids = tuple(ord(letter) - 96 for letter in text) or (0,)
    return Completion(ids, (-0.5,) * len(ids), finish, forced)


class Graded(Reward):
    """Grades by a function, synchronous or not."""

    def __init__(self, grade: Callable[[RewardInput], Any]) -> None:
        self.grade = grade


class Batches:
    """One pack per group; there is no forward, since the policy reads no states."""

    collective = False

    def __init__(self, batch: Sampled) -> None:
        nums_P = [len(completions_G) for completions_G in batch.completions]
        self.micro_batches = pack_groups(batch.prompts, batch.token_ids, 1000, num_sampled_P=nums_P)


def bare_run(**attributes: Any) -> Run:
    """A run with only these attributes and methods, a config and what needs no model."""
    run = Run.__new__(Run)
    vars(run).update({"config": run_config(), "dist": Dist(), "timer": PhaseTimer(), **attributes})
    return run


def collect(
    context: RolloutContext, batch: Sampled, should_stop: Callable[[], bool] = lambda: False
) -> Rollout:
    timer = PhaseTimer()
    pending = begin(context, batch, Batches(batch), timer, should_stop)
    groups = list(pending.groups(timer, should_stop))
    rollout = pending.finished()
    assert groups == list(enumerate(rollout.episodes))
    return rollout
