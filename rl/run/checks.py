"""Stops a run with too many failures, warns of signs of trouble, and checks that equal words have
equal pictures and rewards."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import combinations
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from rl.algorithm.metrics import Metrics
from rl.api.reward import NO_VALUE
from rl.api.types import Episode, Sample, Status
from rl.config.schema import RunConfig
from rl.printing import excerpt
from rl.progress import warn
from rl.ranks.dist import Dist
from rl.rollout.stream import Rollout, RolloutContext
from rl.run.alarms import Watch
from rl.run.episode_metrics import add_ranges, rollout_metrics
from rl.run.metric_table import PluginMetrics

if TYPE_CHECKING:
    from PIL.Image import Image

# ---- contents ------------------------------------------------------------------------------------
# Hashes of what samples show.


def contents_of(sample: Sample) -> tuple[str, ...]:
    """A hash per source picture; without sources, one of the instruction, ignoring letter case."""
    if sample.source_codes is not None:
        contents = [repr(sample.source_codes.tolist()).encode()]
    elif sample.sources:
        contents = [repr(p.size).encode() + p.tobytes() for p in sample.sources]
    else:
        contents = [" ".join(sample.instruction.casefold().split()).encode()]
    return tuple(blake2b(content, digest_size=16).hexdigest() for content in contents)


# ---- checks --------------------------------------------------------------------------------------
# Checks every rollout for failures, and every line of metrics for signs of trouble.

WINDOW_PICTURES = 200
"""The renderer's failure rate is computed over the last iterations with at least this many pictures
in total. Fewer pictures count as this many: one failure in a tiny iteration does not stop a run."""
SHOWN_CHARS = 200


class TooManyFailuresError(RuntimeError):
    """More episodes of an iteration, or of a held-out evaluation, are UNGRADED than
    `judge.max_failure_rate` allows, or the renderer fails more often than
    `max_render_failure_rate` does."""


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
        self._held_out = {key: sample.id for sample in held_out for key in contents_of(sample)}
        """Hash of what a held-out sample shows -> the sample's id."""
        self.watch = watch
        weights = config.final_reward.weights or dict.fromkeys(config.rewards, 1.0)
        self._counted = [name for name, weight in weights.items() if weight]
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
            raise TooManyFailuresError(
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
        add_ranges(metrics, rollout, self._counted, self._dist)
        if self._held_out:
            metrics.total("data/held_out_prompts", self._num_held_out(rollout))
        metrics.update(self.plugin_metrics.take(rollout.renderer_metrics))
        return metrics

    def _num_held_out(self, rollout: Rollout) -> int:
        """Number of this rank's prompts that show the same as a held-out sample."""
        num = 0
        for sample in (episodes_G[0].prompt.sample for episodes_G in rollout.episodes):
            shared = self._held_out.keys() & contents_of(sample)
            num += bool(shared)
            for key in shared:
                self._warn_once(
                    "held-out",
                    f"rank {self._dist.rank}: held-out sample {self._held_out[key]} has the "
                    f"picture or words of training sample {sample.id}, so held-out rewards "
                    "are not of unseen data (logged once; data/held_out_prompts counts all)",
                )
        return num

    def _warn_once(self, key: str, text: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            warn(text)

    def check_line(self, line: Mapping[str, float]) -> None:
        """Warn of conditions that begin with this line of metrics."""
        for sentence in self.watch.sentences(line):
            if self._dist.is_main:
                warn(sentence)


def require_grades(context: RolloutContext, episodes: Iterable[Episode], dist: Dist) -> None:
    """Raise `TooManyFailuresError` on every rank if an evaluation lacks so many grades that it must
    be repeated. Failures that a repetition would not mend do not count: unreadable replies, and a
    reward that has nothing to compare a picture with. Collective."""
    drawn = list(episodes)
    lost = [e for e in drawn if e.status is Status.UNGRADED and not e.unreadable]
    if context.compares_pictures:
        lost = [episode for episode in lost if NO_VALUE not in (episode.failure or "")]
    _limit_failures(
        context.config,
        lost,
        len(drawn),
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


# ---- chain ---------------------------------------------------------------------------------------
# Checks that states, pictures and scores belong to their words: equal words must have equal
# pictures and equal rewards in all variants of an evaluation, along all paths that draw them.

POLICY, BARE = "policy", "bare"
"""Names of two variants: the policy's words, and the user's own."""

ROUNDING = 0.02
"""Rounding changes a model's reward (0..1) of one picture in another batch by less than this."""
MOST_NOISE, MEAN_NOISE = 0.5, 0.2
"""A judge at temperature 1 grades two almost equal pictures with rewards that differ by less than
these: in any one pair, and on average."""

ROUNDING_LEVELS = 2.0
"""Rounding moves a picture of equal words and equal noise by less than this, on average over its
pixels (levels of 0..255)."""
MOST_OF_OTHER_WORDS = 1 / 3
"""Two pictures of equal words may differ by this share of what other words change."""

Variants = Mapping[str, Episode | None]
"""A sample's episodes by variant, all with the plain prompt, today's weights and equal noise."""


class _Pair(NamedTuple):
    """Two variants of a sample."""

    names: str
    equal_words: bool
    gap: float
    """Difference of the rewards, 0..1."""
    levels: float
    """Mean difference of the pictures' pixels, 0..255; 0 without pictures."""
    text: str
    """A message with both rewards."""


def check_equal_words(
    metrics: Metrics,
    variants_P: Sequence[Variants],
    images_per_completion: int,
    at_start: bool,
    dist: Dist,
) -> None:
    """Compare the variants of each sample that have equal words: pictures may differ by rounding,
    rewards of equal pictures by a model's rounding, and other rewards by a judge's noise. Warn of
    more; `at_start`, raise RuntimeError on every rank for equal pictures whose rewards differ by
    more than a judge's noise. Adds `eval/equal_words_levels`, `eval/other_words_levels` if a sample
    has other words and, if the judge has graded two such pictures, `eval/equal_words_std`.
    Collective."""
    local_pairs = [pair for variants in variants_P for pair in _pairs(variants)]
    all_pairs = [pair for rank_pairs in dist.gather(local_pairs) for pair in rank_pairs]
    pairs = [pair for pair in all_pairs if pair.equal_words]
    if not pairs:
        return
    of_other_words = [pair.levels for pair in all_pairs if not pair.equal_words]
    # An episode has only the first of its completion's pictures.
    same = [pair for pair in pairs if pair.levels == 0 and images_per_completion == 1]
    redrawn = [pair for pair in pairs if pair.levels > 0 or images_per_completion > 1]
    sentences = [_compared_pictures(metrics, pairs, of_other_words)]
    if redrawn:
        variance = fmean(pair.gap**2 / 2 for pair in redrawn)
        metrics.maximum("eval/equal_words_std", variance**0.5)
    worst = max(same, key=lambda pair: pair.gap, default=None)
    if worst is not None and worst.gap > ROUNDING:
        unequal = (
            f"equal words and equal pictures have unequal rewards: {worst.text}. Scores are "
            "assigned to another completion than the graded one, or a reward grades one picture "
            "differently each time: make judge and rewards reply in the order of their inputs, and "
            "make each reward a function of its input"
        )
        if at_start and worst.gap > MOST_NOISE:
            raise RuntimeError(unequal)
        sentences.append(unequal)
    elif redrawn:
        sentences.append(_compared_noise(redrawn))
    for sentence in filter(None, sentences if dist.is_main else ()):
        warn(sentence)


def _compared_pictures(
    metrics: Metrics, pairs: Sequence[_Pair], levels_of_other_words: Sequence[float]
) -> str:
    """A warning if the pictures of equal words differ by more than rounding, and by a large share
    of what other words change; '' if not."""
    levels_of: dict[str, list[float]] = {}
    for pair in pairs:
        levels_of.setdefault(pair.names, []).append(pair.levels)
    most, names = max((fmean(levels), names) for names, levels in levels_of.items())
    metrics.maximum("eval/equal_words_levels", most)
    limit = ROUNDING_LEVELS
    if levels_of_other_words:
        metrics.maximum("eval/other_words_levels", fmean(levels_of_other_words))
        limit = max(limit, MOST_OF_OTHER_WORDS * fmean(levels_of_other_words))
    if most <= limit:
        return ""
    return (
        "equal words have different pictures under the same weights and the same noise: "
        f"{most:.1f} of 255 levels apart on average of {len(levels_of[names])} pairs ({names}; "
        f"the limit is {limit:.1f}). Along one of these paths the renderer gets the states, "
        "the sources or the noise of another completion, or its pictures are handed out in "
        "another order; or rounding changes pictures as much as words do"
    )


def _compared_noise(redrawn: Sequence[_Pair]) -> str:
    """A warning if the rewards of equal words, whose pictures are not bit-equal, differ by more
    than a judge's noise; '' if not."""
    worst = max(redrawn, key=lambda pair: pair.gap)
    mean = fmean(pair.gap for pair in redrawn)
    if worst.gap <= MOST_NOISE and mean <= MEAN_NOISE:
        return ""
    return (
        "equal words have unequal rewards under the same weights and the same noise: "
        f"{worst.text}, and {mean:.2f} apart on average of {len(redrawn)} pairs. The renderer gets "
        "the states of another completion, or scores are assigned to another one, or the "
        "judge's scores of one picture differ by that much"
    )


def _pairs(variants: Variants) -> Iterator[_Pair]:
    """Each pair of graded variants with the same reward parts that have equal words, or are the
    policy's and the user's."""
    scored = [
        (name, episode, episode.reward)
        for name, episode in variants.items()
        if episode and episode.reward is not None and episode.status is Status.SCORED
    ]
    for (one, first, reward), (other, second, other_reward) in combinations(scored, 2):
        equal_words = first.completion.token_ids == second.completion.token_ids
        is_compared = equal_words or {one, other} == {POLICY, BARE}
        if is_compared and first.parts.keys() == second.parts.keys():
            yield _Pair(
                f"{one} and {other}",
                equal_words,
                abs(reward - other_reward),
                _levels_apart(first.image, second.image),
                f"held-out sample {excerpt(first.prompt.sample.id, 100)} earns {reward:.3f} ({one})"
                f" and {other_reward:.3f} ({other})",
            )


def _levels_apart(first: Image | None, second: Image | None) -> float:
    """Mean absolute difference of the pixels, 0..255; 255 for pictures of unequal sizes; 0 without
    pictures."""
    if first is None or second is None:
        return 0.0
    if first.size != second.size:
        return 255.0
    one, other = (np.asarray(image.convert("RGB"), dtype=np.int16) for image in (first, second))
    return float(np.abs(one - other).mean())
