"""Draws this rank's prompts in order; makes episodes, with one reward each, of their grades."""

from __future__ import annotations

import asyncio
import functools
import inspect
import itertools
import random
import time
import traceback
from array import array
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, Literal, TypeVar

from PIL.Image import Image

from rl.algorithm.metrics import compose
from rl.api.data import DataSource, OnBadRow, read_row
from rl.api.find import described
from rl.api.plugin import brief
from rl.api.reward import Reward, checked_output
from rl.api.types import (
    Action,
    Completion,
    Episode,
    Prompt,
    RenderFailure,
    RewardInput,
    RewardOutput,
    Sample,
    Status,
    UnusableSampleError,
    is_unreadable,
)
from rl.config.schema import RunConfig
from rl.judge.client import JudgeError
from rl.printing import excerpt
from rl.ranks import signals
from rl.ranks.dist import Dist
from rl.ranks.signals import is_lost_device, is_raised_here

# ---- episodes ------------------------------------------------------------------------------------
# Builds one completion's episode from the grades of its pictures.

Grades = Mapping[str, RewardOutput]
"""Reward name -> its output."""


@dataclass(eq=False)
class Picture:
    """One picture to render. Completions of a group share it if it is drawn from the same ids."""

    p: int
    """Index of its prompt."""
    number: int
    """Index (from 0) among its completion's `images_per_completion` pictures. Pictures of a group
    with the same number share their noise."""
    pairs: dict[tuple[int, ...], PictureAndText] = field(default_factory=dict)
    """Token ids of each completion that the picture is drawn for -> the picture and its text."""
    drawn_of: Sample | None = None
    """The sample of its render job."""
    outcome: Image | RenderFailure | None = None
    has_outcome: bool = False

    @property
    def failure(self) -> RenderFailure | None:
        return self.outcome if isinstance(self.outcome, RenderFailure) else None


@dataclass(eq=False)
class PictureAndText:
    """A picture together with the text and thought of a completion that it is drawn for.
    Completions with equal token ids share one."""

    picture: Picture
    base_input: RewardInput
    """The rewards' input without the picture."""
    grades: Grades = field(default_factory=dict)
    """Set when every reward has graded it."""

    @property
    def can_be_graded(self) -> bool:
        return self.picture.has_outcome and self.picture.failure is None

    @property
    def reward_input(self) -> RewardInput:
        assert not isinstance(self.picture.outcome, RenderFailure)
        return replace(self.base_input, image=self.picture.outcome)

    def grading_unit(self, reward: Reward) -> Picture | PictureAndText:
        """What the reward grades once: this, if the reward reads thoughts; else the picture, which
        several texts may share."""
        return self if reward.reads_thoughts else self.picture


@dataclass(frozen=True)
class PendingEpisode:
    """One completion before its episode is built."""

    prompt: Prompt
    completion: Completion
    action: Action
    failure: str | None
    """Why the completion is not rendered; None if it is rendered."""
    pairs: Sequence[PictureAndText]
    """Its pictures, each with its text; empty if it is not rendered."""


def why_not_rendered(config: RunConfig, completion: Completion, action: Action) -> str | None:
    """A message that says why the completion is not rendered; None if it is rendered."""
    if action.failure is not None:
        return action.failure
    if completion.finish == "length" and config.algorithm.truncated_completions == "floor":
        return "truncated: hit sampling.max_completion_tokens"
    return None


def episode_of(
    config: RunConfig, pending: PendingEpisode, group_id: str, noise_seed: int
) -> Episode:
    """Build a completion's episode when all its grades are known. Its reward and parts are means
    over its pictures. Raises RuntimeError if another prompt's sample was drawn or graded."""
    for pair in pending.pairs:
        require_own_sample(pending.prompt, pair.picture.drawn_of, "drawn")
        require_own_sample(pending.prompt, pair.base_input.sample, "graded")
    drawn = [(r.picture.outcome, r) for r in pending.pairs if isinstance(r.picture.outcome, Image)]
    image, first = drawn[0] if drawn else (None, None)
    episode = functools.partial(
        Episode, group_id, pending.prompt, pending.completion, pending.action, noise_seed, image
    )
    lost = [r.picture.failure for r in pending.pairs if r.picture.failure is not None]
    failures = [pending.failure, *(each.reason for each in lost if each.blame == "policy")]
    if by_policy := [failure for failure in failures if failure is not None]:
        return episode(Status.POLICY_FAILED, 0.0, failure=by_policy[0])

    graded = [pair.grades for pair in pending.pairs if pair.picture.failure is None]
    outputs = [(name, grade) for grades in graded for name, grade in grades.items()]
    ungraded = [(name, grade) for name, grade in outputs if grade.failure is not None]
    causes = [f"renderer: {failure.reason}" for failure in lost]
    causes += [f"{name}: {grade.failure}\n{grade.traceback}".rstrip() for name, grade in ungraded]
    parts: dict[str, list[float]] = {}
    replies: dict[str, tuple[str, ...]] = {}
    for name, grade in outputs:
        replies[name] = replies.get(name, ()) + grade.replies
    rewards: list[float] = []
    for grades in graded:
        values = values_of(grades)
        for part, value in values.items():
            if value is not None:
                parts.setdefault(part, []).append(value)
        # `rl edit` draws without rewards: there are no grades.
        reward = compose(values, config.final_reward) if grades else None
        if reward is not None:
            rewards.append(reward)
    fields: dict[str, Any] = {
        "parts": {name: fmean(values) for name, values in parts.items()},
        "replies": replies,
        "regions": {
            name: grade.regions
            for name, grade in (first.grades if first else {}).items()
            if grade.regions
        },
        "judge_s": max((grade.seconds for _, grade in outputs), default=0.0),
        "failure": "; ".join(causes) or None,
    }
    if causes and (not rewards or config.judge.unreadable == "lowest"):
        fields["unreadable"] = not lost and all(is_unreadable(g.failure) for _, g in ungraded)
    if not rewards:
        fields["failure"] = fields["failure"] or "no reward"
        return episode(Status.UNGRADED, None, **fields)
    return episode(Status.SCORED, fmean(rewards), **fields)


def require_own_sample(prompt: Prompt, used: Sample | None, what: str) -> None:
    """Raise RuntimeError if `used` is not the prompt's sample."""
    own, other = (
        "no sample"
        if each is None
        else f"the sample {each.id!r} ({excerpt(each.instruction, 100)})"
        for each in (prompt.sample, used)
    )
    if own != other:
        raise RuntimeError(
            f"a completion of {own} was {what} with {other}: its score would be of another prompt's"
            " pictures or instruction. A renderer's decode_sources must return the samples in the "
            "order in which it gets them"
        )


def values_of(grades: Mapping[str, RewardOutput]) -> dict[str, float | None]:
    """Values that `final_reward` may use: each reward's, and its parts' as `<reward>/<part>`."""
    values: dict[str, float | None] = {}
    for name, grade in grades.items():
        values[name] = grade.value
        values |= {f"{name}/{part}": value for part, value in grade.parts.items()}
    return values


# ---- grading -------------------------------------------------------------------------------------
# Calls a reward on pictures; an exception of the reward becomes a `RewardOutput` without value.
#
# Axes: `_G` pictures of a group.

Outputs = Sequence[RewardOutput]
T = TypeVar("T")


def own_copy(holder: T) -> T:
    """A deep copy of a `Sample` or `RewardInput`: a plugin that changes it affects no other.
    Pillow's own copy of a picture takes a fifteenth of the time of `deepcopy`."""
    sample: Any = getattr(holder, "sample", holder)
    pictures = [*sample.sources, sample.target, getattr(holder, "image", None)]
    return deepcopy(holder, {id(each): each.copy() for each in pictures if each is not None})


async def scores(
    reward: Reward,
    inputs_G: Sequence[RewardInput],
    unreadable: Literal["ungraded", "lowest"] = "ungraded",
    may_refuse: bool = False,
) -> Outputs:
    """Outputs of a reward, one per input; `inputs_G` has one element if the reward grades
    single pictures. `unreadable`: as `judge.unreadable`. Raises `JudgeError`, which stops the
    run, if the judge is set up wrongly, unless it `may_refuse`."""
    started = time.perf_counter()
    method: Callable[[Any], Any] = reward.score_group if reward.scores_groups() else reward.grade
    try:
        inputs: Any = list(map(own_copy, inputs_G))
        if reward.scores_groups():
            returned = await _call(method, inputs)
            if isinstance(returned, Mapping | str):
                raise TypeError(f"score_group gives {brief(returned)}; expected a list of scores")
            scores_G = list(returned)
            if len(scores_G) != len(inputs_G):
                raise ValueError(f"{len(scores_G)} scores for {len(inputs_G)} pictures")
        else:
            scores_G = [await _call(method, inputs[0])]
        outputs_G = [checked_output(score, reward.unit_parts) for score in scores_G]
    except BaseException as error:  # a real KeyboardInterrupt reaches only the main thread
        task = asyncio.current_task()
        is_cancelled = task is not None and task.cancelling() > 0
        is_refused = isinstance(error, JudgeError) and not may_refuse
        if is_refused or is_lost_device(error) or is_cancelled:
            raise
        is_wrong_value = is_raised_here(error)  # by `checked_output`: no traceback
        form = traceback.format_exception_only if is_wrong_value else traceback.format_exception
        text = "".join(form(error))
        failure = f"raised {described(error)}"
        outputs_G = [RewardOutput(None, failure=failure, traceback=text)] * len(inputs_G)
    if unreadable == "lowest":
        lowest = dict.fromkeys(reward.unit_parts, 0.0)
        outputs_G = [
            replace(output, value=0.0, parts=lowest) if is_unreadable(output.failure) else output
            for output in outputs_G
        ]
    seconds = time.perf_counter() - started
    return [replace(output, seconds=output.seconds or seconds) for output in outputs_G]


async def _call(method: Callable[..., Any | Awaitable[Any]], argument: object) -> Any:
    """Run a coroutine function on this event loop, a plain function (it may block) in a thread."""
    if inspect.iscoroutinefunction(method):
        return await method(argument)
    result = await asyncio.to_thread(_without_stop, method, argument)
    return await result if inspect.isawaitable(result) else result


def _without_stop(method: Callable[..., Any], argument: object) -> Any:
    """`method(argument)`; a StopIteration, which no future can hold, becomes a RuntimeError, as in
    a coroutine."""
    try:
        return method(argument)
    except StopIteration as error:
        text = "a bare next(...) found nothing: StopIteration"
        raise RuntimeError(text).with_traceback(error.__traceback__) from error


# ---- consensus -----------------------------------------------------------------------------------
# Stops all ranks at the same point of the program if any of them is asked to stop.


class Interrupted(Exception):  # noqa: N818 (reads as what happened)
    """The run was asked to stop during rendering or grading; its completions have no episodes."""


def raise_if_interrupted(dist: Dist) -> None:
    """Raise `Interrupted` on every rank if any was asked to stop, else return on every rank: if one
    rank alone raised, the others would hang in their next collective. Collective."""
    if signals.stop_requested(dist):
        raise Interrupted


# ---- prompt order --------------------------------------------------------------------------------
# The order of prompts: a weighted mixture of data sources, as a pure function of the iteration.


def skipping(on_bad_row: OnBadRow) -> AbstractContextManager[None]:
    """With 'skip', a row that cannot be used ends only the block, without an error."""
    return suppress(UnusableSampleError) if on_bad_row == "skip" else nullcontext()


class PromptOrder:
    """Each draw of the run takes the next row of one source, in shuffled order. Sources take turns
    so that their shares are exact. Every epoch of a source has another order."""

    def __init__(
        self,
        sources: Sequence[DataSource],
        weights: Sequence[float],
        seed: int,
        prompts_per_iteration: int,
        on_bad_row: OnBadRow = "error",
    ) -> None:
        """`weights`: > 0, one per source; only their ratios matter."""
        assert sources and all(weight > 0 for weight in weights), weights
        self.num_replaced = 0
        """Prompts replaced because their row was unusable (of this rank, since this start)."""
        self._sources = sources
        self._seed = seed
        self._num_prompts = prompts_per_iteration
        self._on_bad_row = on_bad_row
        self._mixture = _mixture(weights)
        self._draws: list[tuple[int, int]] = []
        """The mixture's draws so far; a million take two seconds."""

    def shard(
        self, iteration: int, rank: int, world_size: int, build: Callable[[Sample], T]
    ) -> list[T]:
        """Apply `build` to this rank's contiguous share of the iteration's samples.

        A row that cannot be read or made into a prompt (e.g. too long) raises UnusableSampleError,
        or under 'skip' is replaced by the next row in its source's order.
        """
        assert self._num_prompts % world_size == 0, (self._num_prompts, world_size)
        per_rank = self._num_prompts // world_size
        draws = self.draws(iteration)[rank * per_rank : (rank + 1) * per_rank]
        return [self._take(source, position, build) for source, position in draws]

    def num_distinct(self, iteration: int) -> int:
        """Number of different rows among all ranks' draws of an iteration."""
        return len(
            {(source, self._index(source, position)) for source, position in self.draws(iteration)}
        )

    def _index(self, source: int, position: int, step: int = 0) -> int:
        """The row that a draw takes, or the one `step` places later in that epoch's order."""
        num_rows = len(self._sources[source])
        epoch, start = divmod(position, num_rows)
        order = _shuffled(f"{self._seed}:{source}:{epoch}", num_rows)
        return order[(start + step) % num_rows]

    def draws(self, iteration: int) -> list[tuple[int, int]]:
        """All ranks' draws of an iteration as (source, number of earlier draws from the source)."""
        start, end = iteration * self._num_prompts, (iteration + 1) * self._num_prompts
        self._draws += itertools.islice(self._mixture, max(0, end - len(self._draws)))
        draws = self._draws[start:end]
        # The mixture repeats a pattern; unshuffled, one rank could always get the same source.
        random.Random(f"{self._seed}:slots:{iteration}").shuffle(draws)
        return draws

    def _take(self, source: int, position: int, build: Callable[[Sample], T]) -> T:
        rows = self._sources[source]
        for step in range(len(rows)):
            with skipping(self._on_bad_row):
                index = self._index(source, position, step)
                item = build(own_copy(read_row(rows, index, f"data.train.{source}")))
                self.num_replaced += step > 0
                return item
        raise UnusableSampleError(f"data source {source}: none of its {len(rows)} rows can be used")


def first_samples(
    sources: Sequence[DataSource], num_samples: int, on_bad_row: OnBadRow = "error"
) -> list[Sample]:
    """The first `num_samples` of sources that take turns, each in its own order, no row twice.

    Returns fewer if a source runs out (the others do not replace its share) or if rows cannot be
    read (with 'skip'). Raises ValueError if two samples have the same id.
    """
    samples: list[Sample] = []
    row_of_id: dict[str, str] = {}
    for n in range(num_samples if sources else 0):
        index, source = divmod(n, len(sources))
        if index >= len(sources[source]):
            continue
        with skipping(on_bad_row):
            key = f"data.validation.{source}"
            sample = own_copy(read_row(sources[source], index, key))
            row = f"{key}, row {index}"
            if row_of_id.setdefault(sample.id, row) != row:
                raise ValueError(
                    f"{row} has the id {sample.id!r} of {row_of_id[sample.id]}; give it another "
                    "one: held-out noise and file names are derived from it"
                )
            samples.append(sample)
    return samples


def usable(
    samples: Sequence[Sample], build_prompt: Callable[[Sample], Prompt], on_bad_row: OnBadRow
) -> list[Sample]:
    """The samples that `build_prompt` accepts; with 'error', raises for one that it rejects."""
    accepted = []
    for sample in samples:
        with skipping(on_bad_row):
            build_prompt(sample)
            accepted.append(sample)
    return accepted


def _mixture(weights: Sequence[float]) -> Iterator[tuple[int, int]]:
    """Yield each draw as (source, number of earlier draws from this source). It goes to the source
    that is furthest behind its share so far.

    After any number of draws every source is within one draw of its share (observed for 2 to 16
    sources).
    """
    shares = [weight / sum(weights) for weight in weights]
    counts = [0] * len(weights)
    for num_after in itertools.count(1):
        deficits = [share * num_after - count for share, count in zip(shares, counts, strict=True)]
        source = deficits.index(max(deficits))
        yield source, counts[source]
        counts[source] += 1


@functools.lru_cache(maxsize=64)
def _shuffled(name: str, length: int) -> array[int]:
    order = array("q", range(length))
    random.Random(name).shuffle(order)
    return order
