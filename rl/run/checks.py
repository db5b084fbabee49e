"""Checks every rollout for failures, and every line of metrics for signs of trouble."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence

from rl.algorithm.metrics import Metrics
from rl.api.reward import NO_VALUE
from rl.api.types import Episode, Sample, Status
from rl.config.schema import RunConfig
from rl.console import warn
from rl.printing import excerpt
from rl.ranks.dist import Dist
from rl.rollout.stream import Rollout, RolloutContext
from rl.run.contents import HeldOutContents
from rl.run.episode_metrics import rollout_metrics
from rl.run.plugin_metrics import PluginMetrics
from rl.run.watch import Watch

WINDOW_PICTURES = 200
"""The renderer's failure rate is computed over the last iterations with at least this many pictures
in total. Fewer pictures count as this many: one failure in a tiny iteration does not stop a run."""
SHOWN_CHARS = 200


class TooManyFailuresError(RuntimeError):
    """More episodes of an iteration, or of a held-out evaluation, are UNGRADED than
    `judge.max_failure_rate` allows."""


class TooManyRenderFailuresError(TooManyFailuresError):
    """The renderer fails more often than `max_render_failure_rate` allows."""


class Checks:
    """Checks a run's rollouts and its lines of metrics; every rank has one."""

    def __init__(
        self,
        config: RunConfig,
        dist: Dist,
        held_out: Sequence[Sample],
        plugin_metrics: PluginMetrics,
        watch: Watch,
    ) -> None:
        self.plugin_metrics = plugin_metrics
        self._config = config
        self._dist = dist
        self._held_out = HeldOutContents(held_out) if held_out else None
        self._watch = watch
        self._rendered: deque[tuple[int, int]] = deque()
        """(number of pictures that the renderer failed to draw, of all) for the last iterations."""
        self._warned: set[str] = set()
        """Keys of warnings that were logged: causes of failed episodes, and 'held-out'."""

    def check_failures(self, rollout: Rollout) -> None:
        """Collective: raises `TooManyFailuresError` if judge or renderer fail too often."""
        self._check_renderer(rollout)
        flat = [episode for episodes_G in rollout.episodes for episode in episodes_G]
        _limit_failures(
            self._config,
            [episode for episode in flat if episode.status is Status.UNGRADED],
            len(flat),
            self._dist,
            what="episodes",
            then="it resumes after the last finished iteration",
        )
        for episode in flat:
            cause = _cause(episode)
            if cause and episode.status is not Status.POLICY_FAILED:
                text = f"rank {self._dist.rank}: {episode.status}: {cause}"
                self._warn_once(cause, f"{text} (logged once; all are in episodes/)")

    def _check_renderer(self, rollout: Rollout) -> None:
        failures = [excerpt(reason, SHOWN_CHARS) for reason in rollout.render_failures]
        gathered = self._dist.gather((failures, rollout.num_drawn))
        causes = Counter(reason for failed, _ in gathered for reason in failed)
        num_pictures = causes.total() + sum(num_drawn for _, num_drawn in gathered)
        if num_pictures == 0:
            return
        window = self._rendered
        window.append((causes.total(), num_pictures))
        while sum(num for _, num in window) - window[0][1] >= WINDOW_PICTURES:
            window.popleft()
        lost, total = (sum(column) for column in zip(*window, strict=True))
        limit = self._config.max_render_failure_rate
        if lost > limit * max(total, WINDOW_PICTURES):
            raise TooManyRenderFailuresError(
                f"{lost} of the last {total} pictures could not be drawn (in this iteration: "
                f"{_listed(causes)}); the limit is max_render_failure_rate={limit:g}, "
                f"counted over {WINDOW_PICTURES} pictures. Fix the cause (an exception's traceback "
                "is in the log), or raise max_render_failure_rate, and start the same command "
                "again: it resumes after the last finished iteration."
            )

    def metrics(self, rollout: Rollout) -> Metrics:
        """Metrics of an iteration's episodes and those that its plugins report. Collective."""
        metrics = rollout_metrics(rollout, self._dist)
        metrics.add("pictures/not_drawn", 1.0, weight=len(rollout.render_failures))
        metrics.add("pictures/not_drawn", 0.0, weight=rollout.num_drawn)
        metrics.update(self._watch.add_rewards(rollout, self._dist))
        if self._held_out is not None:
            metrics.total("data/held_out_prompts", self._num_held_out(rollout, self._held_out))
        metrics.update(self.plugin_metrics.take(rollout.renderer_metrics))
        return metrics

    def _num_held_out(self, rollout: Rollout, held_out: HeldOutContents) -> int:
        """Number of this rank's prompts that show the same as a held-out sample."""
        shared = held_out.shared(episodes_G[0].prompt.sample for episodes_G in rollout.episodes)
        for trained, other in shared.items():
            self._warn_once(
                "held-out",
                f"rank {self._dist.rank}: held-out sample {other} shows the same as training "
                f"sample {trained}, so held-out rewards are not of unseen data (logged once; "
                "data/held_out_prompts counts all)",
            )
        return len(shared)

    def _warn_once(self, key: str, text: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            warn(text)

    def replay(self, lines: Iterable[Mapping[str, float]]) -> None:
        """Read the lines of an earlier process, whose alarms for exploits are logged already."""
        for line in lines:
            self._watch.replay(line)

    def check_line(self, line: Mapping[str, float]) -> None:
        """Warn of conditions that begin with this line of metrics (see `Watch`)."""
        for sentence in self._watch.sentences(line):
            if self._dist.is_main:
                warn(sentence)


def require_grades(
    context: RolloutContext, episodes: Iterable[Episode | None], dist: Dist, num_samples: int = 0
) -> None:
    """Raise `TooManyFailuresError` on every rank if an evaluation lacks so many grades that it must
    be repeated. What would come again does not count: unreadable replies, and a reward that has
    nothing to compare a picture with. Collective.

    `num_samples`: held-out samples of this rank. The limit is a share of them where `episodes` are
    those of the few that an earlier evaluation could not grade.
    """
    drawn = [episode for episode in episodes if episode is not None]
    lost = [e for e in drawn if e.status is Status.UNGRADED and not e.unreadable]
    if context.compares_pictures:
        lost = [episode for episode in lost if NO_VALUE not in (episode.failure or "")]
    _limit_failures(
        context.config,
        lost,
        max(len(drawn), num_samples),
        dist,
        what="pictures or answers of the held-out evaluation",
        then="it repeats this evaluation, of which nothing is recorded",
    )


def _limit_failures(
    config: RunConfig, ungraded: Sequence[Episode], num: int, dist: Dist, what: str, then: str
) -> None:
    """Raise `TooManyFailuresError` on every rank if `ungraded` are more than
    `judge.max_failure_rate` of all ranks' `num`. Collective."""
    lost, total = dist.sum_floats([len(ungraded), num])
    limit = config.judge.max_failure_rate
    if total == 0 or lost / total <= limit:
        return
    gathered = dist.gather(
        (Counter(map(_cause, ungraded)), [episode.failure for episode in ungraded[:1]])
    )
    causes = sum((counts for counts, _ in gathered), Counter[str]())
    first = next(failure for _, failures in gathered for failure in failures)
    raise TooManyFailuresError(
        f"{int(lost)} of {int(total)} {what} could not be graded ({_listed(causes)}); the "
        f"limit is judge.max_failure_rate={limit}. Fix the cause (an error in a reward's code, "
        f"or a judge that is down) and start the same command again: {then}. The first failure: "
        f"{first}"
    )


def _cause(episode: Episode) -> str:
    """The first two parts of an episode's failure, which name its cause; '' without failure."""
    return ": ".join((episode.failure or "").split("\n")[0].split(": ")[:2])


def _listed(causes: Counter[str]) -> str:
    """The five most frequent causes, e.g. '3 x level: timeout, 1 x renderer: ragged'."""
    return ", ".join(f"{num} x {cause}" for cause, num in causes.most_common(5)) or "none"
