"""Writes and prints a run's iterations: metrics, episodes, time per phase."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from shlex import quote
from statistics import median

from rl.algorithm.metrics import Metrics
from rl.api.types import Episode
from rl.console import Console, GroupPanel, PhaseTimer
from rl.ranks.dist import Dist
from rl.record.run_record import BackgroundWriter, RunRecord
from rl.rollout.stream import GradedGroup
from rl.run.before_after import before_after
from rl.run.page_refresh import Page
from rl.trackers import Tracker


@dataclass(eq=False)
class Recording:
    """Writes a run's metrics and episodes to disk, trackers and console; every rank has one."""

    dist: Dist
    console: Console
    timer: PhaseTimer
    group_panel: GroupPanel
    record: RunRecord
    tracker: Tracker
    page: Page
    writer: BackgroundWriter
    """Writes everything about an iteration in the background, in order."""
    num_iterations: int
    last_metrics: Mapping[str, float] = field(default_factory=dict)
    """The last line of metrics that was written."""

    def line(self, metrics: Metrics, finished: Mapping[str, float]) -> dict[str, float]:
        """One line of metrics of all ranks: `metrics`, those with which the iteration `finished`,
        and the time of its phases. Collective."""
        by_rank = self.dist.gather((metrics.state(), self.timer.own_seconds()))
        return {
            **Metrics.merge([state for state, _ in by_rank]),
            **finished,
            **self.timer.lap(),
            **rank_times([seconds for _, seconds in by_rank]),
        }

    def write_line(self, done: int, line: Mapping[str, float], was_evaluated: bool) -> None:
        """Write the line to the record and the trackers, and print it."""
        self.last_metrics = line
        # Two tasks: the writer may repeat a failed one, and must not record a line twice.
        write = partial(self.record.write_metrics, done, line)
        self.writer.put(f"the metrics of iteration {done}", write)
        if was_evaluated:
            compare = partial(before_after, self.record.run_dir, done)
            log = partial(self.tracker.log_before_after, compare)
            self.writer.put(f"the pictures before and after iteration {done}", log)
        show = partial(self.tracker.log, done, line)
        self.writer.put(f"the metrics of iteration {done} for wandb", show)
        if self.dist.is_main and was_evaluated:
            self.writer.put(f"the page after iteration {done}", self.page.refresh)
        self.console.iteration(done, self.num_iterations, line)
        self.group_panel.show()

    def write_episodes(
        self, done: int, groups_P: Sequence[GradedGroup], bare_P: Sequence[Episode | None] = ()
    ) -> None:
        """Write provenance and pictures of an iteration. `bare_P`: bare arms by `group.p`."""
        episodes_PG = [[_off_device(episode) for episode in group.episodes] for group in groups_P]
        advantages_PG = [group.advantages for group in groups_P]
        arms_P = [bare_P[group.p] if bare_P else None for group in groups_P]
        bare_arms_P = [None if arm is None else _off_device(arm) for arm in arms_P]
        self.group_panel.note(done, episodes_PG, advantages_PG)

        def write() -> None:
            num_later = self.num_iterations - done
            self.record.write_episodes(done, episodes_PG, advantages_PG, bare_arms_P, num_later)
            self.tracker.log_episodes(done, episodes_PG, advantages_PG)

        self.writer.put(f"the record of iteration {done}", write)

    def end(self) -> None:
        """Wait until everything is on disk, then print the time per phase, and what comes next."""
        self.writer.flush()
        self.console.print_phase_times(self.timer)
        run = quote(str(self.record.run_dir))
        if self.page.wanted:
            self.console.say(f"page: {run}/report/index.html")
        self.console.say(f"what it learnt: rl report {run}\nuse it: rl edit --run {run} ...")


def _off_device(episode: Episode) -> Episode:
    """The episode without its tensors on the device, which would stay there until it is written."""
    return replace(episode, prompt=replace(episode.prompt, images=(), model_inputs={}))


def rank_times(seconds_by_rank: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """`time/<phase>_max_over_median`, also for the whole `iteration`, and `time/slowest_rank`;
    {} with one rank.

    `seconds_by_rank`: seconds of each phase in rank order, without waits for other ranks.
    """
    if len(seconds_by_rank) == 1:
        return {}
    phases = dict.fromkeys(phase for seconds in seconds_by_rank for phase in seconds)
    columns = {phase: [of_rank.get(phase, 0.0) for of_rank in seconds_by_rank] for phase in phases}
    columns["iteration"] = whole = [sum(of_rank.values()) for of_rank in seconds_by_rank]
    metrics = {
        f"time/{phase}_max_over_median": max(seconds) / middle
        for phase, seconds in columns.items()
        if (middle := median(seconds)) > 0
    }
    return {**metrics, "time/slowest_rank": float(whole.index(max(whole)))}
