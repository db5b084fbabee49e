"""Stops a run that cannot learn: too many failures, states that the renderer does not read."""

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
from rl.console import warn
from rl.printing import excerpt
from rl.ranks.dist import Dist
from rl.rollout.stream import Rollout, RolloutContext
from rl.run.alarms import Watch
from rl.run.episode_metrics import add_ranges, rollout_metrics
from rl.run.metric_table import PluginMetrics

if TYPE_CHECKING:
    from PIL.Image import Image

    from rl.ranks.dist import Dist

# ---- contents ------------------------------------------------------------------------------------
# Hashes of what samples show, and a search for held-out pictures in training samples.

SIDE_PX = 8
SAME_VIEW = 0.075
"""Pictures are copies if their 8 x 8 thumbnails' distance, relative to their contrast, is less. For
64 x 64 px pictures, JPEG (quality >= 50) and resizing cause distances up to 0.068; the smallest
distance of two million pairs of generated scenes is 0.108."""
SAME_ASPECT = 0.03
"""Copies differ in width / height by less than this share: resizing rounds the sides."""


def contents_of(sample: Sample) -> tuple[str, ...]:
    """A hash per source picture; without sources, one of the instruction, ignoring letter case."""
    if sample.source_codes is not None:
        contents = [repr(sample.source_codes.tolist()).encode()]
    elif sample.sources:
        contents = [repr(p.size).encode() + p.tobytes() for p in sample.sources]
    else:
        contents = [" ".join(sample.instruction.casefold().split()).encode()]
    return tuple(blake2b(content, digest_size=16).hexdigest() for content in contents)


class HeldOutContents:
    """Finds training samples that repeat a held-out sample."""

    def __init__(self, held_out: Sequence[Sample]) -> None:
        """Reads the held-out samples' pictures once."""
        self._ids = {key: sample.id for sample in held_out for key in contents_of(sample)}
        self._owners = [sample.id for sample in held_out for _ in sample.sources]
        views = [_view(picture) for sample in held_out for picture in sample.sources]
        self._views, self._contrasts, self._aspects = (
            np.array([view[i] for view in views]) for i in range(3)
        )

    def shared(self, training: Iterable[Sample]) -> dict[str, str]:
        """Id of each training sample that repeats a held-out sample -> the held-out sample's id. It
        has a copy of its picture, of any size or file format; without pictures, its instruction."""
        held_out_of = {}
        for sample in training:
            keys = [key for key in contents_of(sample) if key in self._ids]
            copied_ids = (self._copied(picture) for picture in sample.sources)
            held_out_id = self._ids[keys[0]] if keys else next(filter(None, copied_ids), None)
            if held_out_id is not None:
                held_out_of[sample.id] = held_out_id
        return held_out_of

    def _copied(self, picture: Image) -> str | None:
        """Id of the held-out sample whose picture is a copy of this one; None if there is none."""
        if not self._owners:
            return None
        view, contrast, aspect = _view(picture)
        distances = np.sqrt(((self._views - view) ** 2).mean(-1))
        is_copy = distances < SAME_VIEW * np.minimum(self._contrasts, contrast)
        is_copy &= np.abs(self._aspects / aspect - 1) < SAME_ASPECT
        return self._owners[int(is_copy.argmax())] if is_copy.any() else None


def _view(picture: Image) -> tuple[np.ndarray, float, float]:
    """(thumbnail [8 * 8 * 3] float32 0..255, RMS deviation from channel means, width / height)."""
    from PIL.Image import Resampling

    small = picture.convert("RGB").resize((SIDE_PX, SIDE_PX), Resampling.BILINEAR, reducing_gap=3.0)
    view = np.asarray(small, dtype=np.float32).reshape(-1, 3)
    contrast = float(np.sqrt(((view - view.mean(0)) ** 2).mean()))
    return view.reshape(-1), contrast, picture.width / picture.height


# ---- checks --------------------------------------------------------------------------------------
# Checks every rollout for failures, and every line of metrics for signs of trouble.

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
        add_ranges(metrics, rollout, self._counted, self._dist)
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

    def check_line(self, line: Mapping[str, float]) -> None:
        """Warn of conditions that begin with this line of metrics."""
        for sentence in self.watch.sentences(line):
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
    levels: float | None
    """Mean difference of the pictures' pixels, 0..255; None if only one is at hand."""
    text: str
    """A message with both rewards."""


class UnequalRewardsError(RuntimeError):
    """Equal words with equal pictures have unequal rewards."""


def check_equal_words(
    metrics: Metrics,
    variants_P: Sequence[Variants],
    images_per_completion: int,
    at_start: bool,
    dist: Dist,
) -> None:
    """Add `eval/equal_words_std`, if any pictures of equal words are not bit-equal, so that the
    judge has graded both, and how far such pictures are apart. If two variants have equal words,
    equal pictures and unequal rewards, warn; `at_start`, and beyond a judge's noise, raise
    `UnequalRewardsError` on every rank. If the pictures are not bit-equal, warn if they differ by
    more than rounding explains, or their rewards by more than a judge's noise. Collective."""
    local_pairs = [pair for variants in variants_P for pair in _pairs(variants)]
    all_pairs = [pair for rank_pairs in dist.gather(local_pairs) for pair in rank_pairs]
    _check_pictures(metrics, all_pairs, dist)
    pairs = [pair for pair in all_pairs if pair.equal_words]
    exact, others = [(0.0, "")], list[tuple[float, str]]()
    for pair in pairs:
        # Whether the same picture was graded. (An episode has only its completion's first.)
        is_exact = pair.levels == 0 and images_per_completion == 1
        (exact if is_exact else others).append((pair.gap, pair.text))
    exact_gap, exact_text = max(exact)
    if others:
        variance = fmean(gap**2 / 2 for gap, _ in others)
        metrics.maximum("eval/equal_words_std", variance**0.5)
    most, mean = max(others, default=(0.0, "")), fmean([gap for gap, _ in others] or [0.0])
    if exact_gap > ROUNDING:
        sentence = (
            f"equal words and equal pictures have unequal rewards: {exact_text}. Scores are "
            "assigned to another completion than the graded one, or a reward grades one picture "
            "differently each time: make judge and rewards reply in the order of their inputs, and "
            "make each reward a function of its input"
        )
        if at_start and exact_gap > MOST_NOISE:
            raise UnequalRewardsError(sentence)
    elif most[0] > MOST_NOISE or mean > MEAN_NOISE:
        sentence = (
            "equal words have unequal rewards under the same weights and the same noise: "
            f"{most[1]}, and {mean:.2f} apart on average of {len(others)} pairs. The renderer gets "
            "the states of another completion, or scores are assigned to another one, or the "
            "judge's scores of one picture differ by that much"
        )
    else:
        return
    if dist.is_main:
        warn(sentence)


def _check_pictures(metrics: Metrics, pairs: Sequence[_Pair], dist: Dist) -> None:
    """Add how far the pictures of equal words and of other words are apart; warn if the former
    differ by more than rounding, and by a large share of the latter."""
    levels_of: dict[str, list[float]] = {}
    other_words = list[float]()
    for pair in pairs:
        if pair.levels is not None:
            levels = levels_of.setdefault(pair.names, []) if pair.equal_words else other_words
            levels.append(pair.levels)
    if not levels_of:
        return
    most, names = max((fmean(levels), names) for names, levels in levels_of.items())
    metrics.maximum("eval/equal_words_levels", most)
    limit = ROUNDING_LEVELS
    if other_words:
        metrics.maximum("eval/other_words_levels", fmean(other_words))
        limit = max(limit, MOST_OF_OTHER_WORDS * fmean(other_words))
    if most > limit and dist.is_main:
        warn(
            "equal words have different pictures under the same weights and the same noise: "
            f"{most:.1f} of 255 levels apart on average of {len(levels_of[names])} pairs ({names}; "
            f"the limit is {limit:.1f}). Along one of these paths the renderer gets the states, "
            "the sources or the noise of another completion, or its pictures are handed out in "
            "another order; or rounding changes pictures as much as words do"
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
        if first.parts.keys() != second.parts.keys():
            continue
        if equal_words or {one, other} == {POLICY, BARE}:
            yield _Pair(
                f"{one} and {other}",
                equal_words,
                abs(reward - other_reward),
                _levels_apart(first.image, second.image),
                f"held-out sample {excerpt(first.prompt.sample.id, 100)} earns {reward:.3f} ({one})"
                f" and {other_reward:.3f} ({other})",
            )


def _levels_apart(first: Image | None, second: Image | None) -> float | None:
    """Mean absolute difference of the pixels, 0..255; 255 for pictures of unequal sizes; 0 without
    pictures, None with only one."""
    if first is None or second is None:
        return 0.0 if first is second else None
    if first.size != second.size:
        return 255.0
    one, other = (np.asarray(image.convert("RGB"), dtype=np.int16) for image in (first, second))
    return float(np.abs(one - other).mean())
