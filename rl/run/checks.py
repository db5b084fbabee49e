"""Checks of every rollout: what failed, what looks wrong, and the metrics of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rl.algorithm.metrics import Metrics
from rl.api.types import Episode, Sample, Status
from rl.config.schema import RunConfig
from rl.console.console import warn
from rl.judge.client import JudgeClient
from rl.ranks.dist import Dist
from rl.rollout.stream import Rollout
from rl.run.contents import HeldOutContents
from rl.run.episode_metrics import (
    TooManyFailuresError,
    check_failure_rate,
    check_rewards,
    failure_causes,
    rollout_metrics,
)
from rl.run.lost_pictures import LostPictures
from rl.run.metric_table import check_known
from rl.run.plug_metrics import PlugMetrics
from rl.run.watch import Watch


class Checks:
    """Checks a run's rollouts and its lines of metrics; every rank has one."""

    def __init__(
        self,
        config: RunConfig,
        dist: Dist,
        judge: JudgeClient | None,
        held_out: Sequence[Sample],
        plug_metrics: PlugMetrics,
        watch: Watch,
    ) -> None:
        self.plug_metrics = plug_metrics
        self._config = config
        self._dist = dist
        self._judge = judge
        self._contents = HeldOutContents(held_out) if held_out else None
        self._lost_pictures = LostPictures(config.max_render_failure_rate)
        self._watch = watch
        self._warned: set[str] = set()
        """What is warned of once: causes of ungraded episodes, shared samples."""

    def failures(self, rollout: Rollout) -> None:
        """Raises `TooManyFailuresError` for a judge or a renderer that fails too often, on every
        rank together. Collective."""
        check_rewards(rollout.reward_errors, self._dist)
        self._lost_pictures.add(rollout.pictures, self._dist)
        try:
            check_failure_rate(self._config, rollout.episodes, self._dist)
        except TooManyFailuresError:
            if self._judge is not None:
                self._judge.forget_failed()
            raise
        self._warn_of_ungraded(rollout.episodes)

    def _warn_of_ungraded(self, episodes_PG: Sequence[Sequence[Episode]]) -> None:
        for cause, count in failure_causes(episodes_PG).items():
            if cause.startswith(Status.UNGRADED) and cause not in self._warned:
                self._warned.add(cause)
                where = "said once; each is in episodes/"
                warn(f"rank {self._dist.rank}: {count} completions {cause} ({where})")

    def metrics(self, rollout: Rollout) -> Metrics:
        """What an iteration's episodes show and what its plugins report. Collective."""
        metrics = rollout_metrics(rollout, self._dist)
        metrics.update(self._lost_pictures.metrics)
        metrics.update(self._watch.add_rewards(rollout, self._dist))
        if self._contents is not None:
            metrics.total("data/held_out_prompts", self._num_held_out(rollout, self._contents))
        metrics.update(self.plug_metrics.take(rollout.renderer_metrics))
        return metrics

    def _num_held_out(self, rollout: Rollout, contents: HeldOutContents) -> int:
        """How many of this rank's prompts show what a held-out sample shows."""
        samples = [episodes_G[0].prompt.sample for episodes_G in rollout.episodes]
        shared = contents.shared(samples)
        if shared and "held-out" not in self._warned:
            self._warned.add("held-out")
            trained, held_out = next(iter(shared.items()))
            warn(
                f"rank {self._dist.rank}: training sample {trained} shows what held-out sample "
                f"{held_out} shows; held-out rewards are not of unseen data (said once; "
                "data/held_out_prompts counts)"
            )
        return len(shared)

    def line(self, line: Mapping[str, float], is_last: bool) -> None:
        """Checks one line of metrics: that every name is in the table, and the alarms that look at
        several iterations."""
        check_known(line, self.plug_metrics.rows)
        for sentence in self._watch.sentences(line, is_last):
            if self._dist.is_main:
                warn(sentence)
