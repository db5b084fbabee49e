"""From completions to graded episodes: condition, render, judge, as one stream.

`begin` takes micro-batch after micro-batch through the policy's forward (one per group, prompt and
all completions together), hands its pictures to the renderer and each picture's questions to the
judge the moment it exists, while later ones render. Beside each group runs the bare arm: what the
user's own words alone would give, under the same noise.

Axes: `_P` prompts on this rank, `_G` completions in a group.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, TypeVar

from PIL.Image import Image

from rl.api.plug import shown
from rl.api.policy import Policy
from rl.api.renderer import Renderer
from rl.api.reward import Reward
from rl.api.types import (
    Action,
    Completion,
    Episode,
    Prompt,
    RenderFailure,
    RenderJob,
    RewardInput,
    RewardOutput,
)
from rl.config.schema import RunConfig
from rl.console.console import PhaseTimer
from rl.console.progress import counted
from rl.files.images import own_pictures
from rl.judge.background import BackgroundLoop
from rl.learner.micro_batches import Forwards, Member
from rl.ranks.seeding import derive_seed
from rl.rollout import grading
from rl.rollout.consensus import Interrupted
from rl.rollout.episodes import (
    Arm,
    Picture,
    PictureOutcome,
    Reading,
    Verdict,
    episode_of,
    picture_outcome,
    why_not_rendered,
)
from rl.rollout.waiting import Waiting

T = TypeVar("T")


@dataclass(frozen=True)
class RolloutContext:
    """Everything that turns completions into graded episodes."""

    config: RunConfig
    policy: Policy
    renderer: Renderer
    rewards: Mapping[str, Reward]
    makes_images: bool
    """Whether the renderer draws at all: without pictures there is no bare arm."""
    loop: BackgroundLoop
    """Where the judge's coroutines run while this thread renders."""


@dataclass(frozen=True, eq=False)
class Sampled:
    """Completions to be rendered and judged. All completions of a group share their noise."""

    prompts: Sequence[Prompt]
    """_P."""
    completions: Sequence[Sequence[Completion]]
    """_PG."""
    noise_seeds: Sequence[int]
    """_P."""
    group_ids: Sequence[str]
    """_P."""
    bare: Sequence[Completion | None]
    """_P, the bare arm; None where nobody asked or the policy has none."""

    @property
    def arms(self) -> list[list[Completion]]:
        """_P, each group's completions and, last, its bare arm."""
        return [
            [*completions_G, *([] if bare is None else [bare])]
            for completions_G, bare in zip(self.completions, self.bare, strict=True)
        ]

    @property
    def token_ids(self) -> list[list[tuple[int, ...]]]:
        """_P, of every arm: what the policy's forward runs over."""
        return [[completion.token_ids for completion in arms_G] for arms_G in self.arms]


@dataclass(frozen=True)
class RewardErrors:
    """How often a reward was asked about this rank's pictures, and how often it raised."""

    num_asked: int
    num_raised: int
    traceback: str
    """Of the first; '' when none did."""


@dataclass(frozen=True)
class Rollout:
    """What a batch of completions came to."""

    episodes: list[list[Episode]]
    """_PG, in the order of the completions."""
    bare_episodes: list[Episode | None]
    """_P, the bare arm, never trained; None where nobody asked or the policy has none."""
    renderer_metrics: Mapping[str, float] | Exception = field(default_factory=dict)
    """What the renderer reported of these pictures, means over them."""
    reward_errors: Mapping[str, RewardErrors] = field(default_factory=dict)
    """By the name of the reward, those that were asked."""
    pictures: Sequence[PictureOutcome] = ()
    """Distinct ones, in the renderer's order, but those that failed through the policy."""


def never() -> bool:
    return False


def begin(
    context: RolloutContext,
    sampled: Sampled,
    forwards: Forwards,
    timer: PhaseTimer,
    should_stop: Callable[[], bool] = never,
) -> PendingRollout:
    """Render every arm and ask the judge about it; the verdicts are still on their way.

    Two completions of a group that say the same are one picture: it is rendered once, and judged
    once unless they thought differently before and a reward reads that. Raises
    `Interrupted` soon after `should_stop()` turns true: rendering may take longer than a pre-empted
    run is given.
    """
    with timer.phase("render") as phase:
        own_P = [own_pictures(prompt.sample) for prompt in sampled.prompts]
        decoded_P = context.renderer.decode_sources(own_P)
        prompts_P = [
            prompt if decoded is own else replace(prompt, sample=decoded)
            for prompt, own, decoded in zip(sampled.prompts, own_P, decoded_P, strict=True)
        ]
        pending = PendingRollout(context, sampled)
        jobs: Iterable[RenderJob] = _jobs(
            context, replace(sampled, prompts=prompts_P), forwards, pending, timer, should_stop
        )
        if forwards.collective:
            jobs = list(jobs)
        try:
            with counted(*_to_make(context, sampled)) as progress:
                for number, outcome in context.renderer.render(jobs):
                    if should_stop():
                        raise Interrupted
                    _check_outcome(context, outcome)
                    pending.submit(number, outcome)
                    progress.step()
        except BaseException:
            pending.cancel()
            raise
        pending.submit_groups()
        if context.makes_images:
            phase.note(f"{pending.num_pictures} pictures")
    pending.renderer_metrics = _reported(context.renderer)
    return pending


def _to_make(context: RolloutContext, sampled: Sampled) -> tuple[str, int]:
    """(what is made, how many at most): what turns out to be nothing that can be drawn is not."""
    num_different = sum(len({c.token_ids for c in arms_G}) for arms_G in sampled.arms)
    what = "pictures" if context.makes_images else "answers"
    return what, num_different * context.config.images_per_completion


def _check_outcome(context: RolloutContext, outcome: object) -> None:
    if isinstance(outcome, Image | RenderFailure) or (outcome is None and not context.makes_images):
        return
    raise TypeError(
        f"renderer: {context.config.renderer['type']} draws {shown(outcome)}; expected an RGB "
        "picture of PIL, or a RenderFailure"
    )


def _jobs(
    context: RolloutContext,
    sampled: Sampled,
    forwards: Forwards,
    pending: PendingRollout,
    timer: PhaseTimer,
    should_stop: Callable[[], bool],
) -> Iterator[RenderJob]:
    """The pictures to make; a group's forward runs when its first one is asked for."""
    arms_PG = sampled.arms
    for micro_batch in forwards.micro_batches:
        if should_stop() and not forwards.collective:
            raise Interrupted
        with timer.phase("condition"):
            batch, outputs = (
                forwards.states(micro_batch) if context.policy.reads_states else (None, None)
            )
            actions = context.policy.decode_actions(micro_batch.rows, batch, outputs)
            del batch, outputs
        for (p, g), action in zip(micro_batch.members, actions, strict=True):
            if p < 0:  # a filler
                continue
            completion = arms_PG[p][g]
            for picture in pending.expect((p, g), sampled.prompts[p], completion, action):
                noise_seed = _noise(sampled.noise_seeds[p], picture.number)
                yield RenderJob(own_pictures(sampled.prompts[p].sample), action.payload, noise_seed)


def _noise(group_seed: int, picture: int) -> int:
    """The group's own seed for the first picture, derived ones for the others."""
    return group_seed if picture == 0 else derive_seed(group_seed, picture)


class PendingRollout:
    """A batch whose pictures are rendered and graded, in part already."""

    def __init__(self, context: RolloutContext, sampled: Sampled) -> None:
        self.renderer_metrics: Mapping[str, float] | Exception = {}
        self._context = context
        self._sampled = sampled
        self._arms_P = sampled.arms
        self._arms: dict[Member, Arm] = {}
        self._distinct: dict[tuple[int, tuple[int, ...], int], Picture] = {}
        """The pictures by prompt index, the token ids they are drawn from, and their number."""
        self._pictures: list[Picture] = []
        """The same pictures in the order in which the renderer gets them."""
        self._rewards = {
            reads: {name: r for name, r in context.rewards.items() if r.reads_thoughts == reads}
            for reads in (False, True)
        }
        """The rewards by whether they read thoughts."""
        self._comparing = [
            reads
            for reads, rewards in self._rewards.items()
            if any(reward.scores_groups() for reward in rewards.values())
        ]
        self._compared: set[int] = set()
        """Prompt indices whose pictures were sent to the rewards that compare."""
        self._futures: list[Future[Any]] = []
        """Every grade that was asked for."""
        self._episodes_PG: list[list[Episode]] = []

    @property
    def num_pictures(self) -> int:
        return len(self._pictures)

    def expect(
        self, member: Member, prompt: Prompt, completion: Completion, action: Action
    ) -> list[Picture]:
        """Note a completion; returns those of its pictures that no equal one has asked for."""
        config, ids = self._context.config, completion.token_ids
        failure = why_not_rendered(config, completion, action)
        source_ids = ids if action.drawn_from is None else action.drawn_from
        about = RewardInput(prompt.sample, action.text, None, action.thought)
        new, readings = [], []
        for number in range(0 if failure else config.images_per_completion):
            key = (member[0], source_ids, number)
            if key not in self._distinct:
                self._distinct[key] = Picture(member[0], number)
                new.append(self._distinct[key])
            picture = self._distinct[key]
            if ids not in picture.readings:
                picture.readings[ids] = Reading(picture, about)
                if picture.is_made:
                    self._ask(picture.readings[ids])
            readings.append(picture.readings[ids])
        # Without the payload: a batch's hidden states are a gigabyte beside the step.
        action = replace(action, payload=None)
        self._arms[member] = Arm(prompt, completion, action, failure, readings)
        self._pictures += new
        return new

    def submit(self, number: int, outcome: Image | RenderFailure | None) -> None:
        """Picture `number` exists: its questions leave for the judge."""
        picture = self._pictures[number]
        # A renderer may draw the next one on the same canvas.
        picture.outcome = outcome.copy() if isinstance(outcome, Image) else outcome
        picture.is_made = True
        for reading in picture.readings.values():
            self._ask(reading)
        self._compare(picture.p)

    def _ask(self, reading: Reading) -> None:
        """The rewards about a picture that exists."""
        picture = reading.picture
        if isinstance(picture.outcome, RenderFailure):
            return
        if picture.grades is None:
            picture.grades = self._future(grading.grade(self._rewards[False], reading.reward_input))
        reading.grades = self._future(grading.grade(self._rewards[True], reading.reward_input))

    def _future(self, grades: Coroutine[Any, Any, T]) -> Future[T]:
        future = self._context.loop.submit(grades)
        self._futures.append(future)
        return future

    def submit_groups(self) -> None:
        """Every picture exists: what was left to compare leaves."""
        for p in range(len(self._arms_P)):
            self._compare(p)

    def _compare(self, p: int) -> None:
        """Send a prompt's pictures, once all exist, to the rewards that compare those of one noise:
        each picture once, and to a reward that reads thoughts each reading."""
        if p in self._compared or any(
            (p, g) not in self._arms for g in range(len(self._arms_P[p]))
        ):
            return
        readings = self._readings(p)
        if not all(reading.picture.is_made for reading in readings):
            return
        self._compared.add(p)
        numbers = sorted({reading.picture.number for reading in readings})
        for number, reads in product(numbers, self._comparing):
            group: dict[Picture | Reading, Reading] = {}
            for reading in readings:
                if reading.picture.number == number and reading.grades is not None:
                    group.setdefault(reading if reads else reading.picture, reading)
            if group:
                inputs_G = [reading.reward_input for reading in group.values()]
                future = self._future(grading.score_group(self._rewards[reads], inputs_G))
                for place, member in enumerate(group):
                    member.compared = future, place

    def _readings(self, p: int) -> list[Reading]:
        """A prompt's distinct readings, in the order of its completions."""
        arms = [self._arms[p, g] for g in range(len(self._arms_P[p]))]
        return list(dict.fromkeys(reading for arm in arms for reading in arm.readings))

    def cancel(self) -> None:
        for future in self._futures:
            future.cancel()

    def still_waiting(self) -> bool:
        """Whether a verdict is missing."""
        return not all(future.done() for future in self._futures)

    def groups(
        self, timer: PhaseTimer, should_stop: Callable[[], bool] = never
    ) -> Iterator[tuple[int, list[Episode]]]:
        """Yield (p, its episodes), group by group in order, each once its last verdict is in.

        Raises what the judge refuses (`JudgeRefused`): a judge that is set up wrongly stops the
        run, a judge that is down leaves episodes UNGRADED. Raises `Interrupted` soon after
        `should_stop()` turns true.
        """
        assert all(picture.is_made for picture in self._pictures), "the renderer lost a job"
        sampled = self._sampled
        waiting = Waiting(self._futures, should_stop)
        try:
            for p, arms_G in enumerate(self._arms_P):
                with timer.phase("judge_wait") as phase:
                    for reading in self._readings(p):
                        reading.verdict = self._verdict(reading, waiting)
                    if p == len(sampled.prompts) - 1:
                        phase.note(self._latency())
                config, group = self._context.config, (sampled.group_ids[p], sampled.noise_seeds[p])
                episodes = [
                    episode_of(config, self._arms[p, g], *group) for g in range(len(arms_G))
                ]
                self._episodes_PG.append(episodes)
                yield p, episodes[: len(sampled.completions[p])]
        except BaseException:
            self.cancel()
            raise
        finally:
            waiting.end()

    def _verdict(self, reading: Reading, waiting: Waiting) -> Verdict:
        outcome = reading.picture.outcome
        if isinstance(outcome, RenderFailure):
            return Verdict(None, outcome)
        grades: dict[str, RewardOutput] = {}
        for graded in (reading.picture, reading):
            assert graded.grades is not None
            alone: grading.Grades = waiting.result(graded.grades)
            grades.update(alone)
            if graded.compared is not None:
                future, place = graded.compared
                grades |= waiting.result(future)[place]
        # In the config's order, whichever way they were asked.
        return Verdict(outcome, None, {name: grades[name] for name in self._context.rewards})

    def _graded(self) -> list[grading.Grades]:
        """The grades of every verdict that is in."""
        readings = [r for p in range(len(self._arms_P)) for r in self._readings(p)]
        verdicts = [reading.verdict for reading in readings]
        return [v.grades for v in verdicts if v is not None and v.failure is None]

    def _latency(self) -> str:
        """'verdicts after 0.8 s (median), 2.1 s (longest)', or '' when nothing was graded."""
        seconds = sorted(
            max((output.seconds for output in grades.values()), default=0.0)
            for grades in self._graded()
        )
        if not seconds:
            return ""
        median_s = seconds[len(seconds) // 2]
        return f"verdicts after {median_s:.1f} s (median), {seconds[-1]:.1f} s (longest)"

    def finished(self) -> Rollout:
        groups = list(zip(self._episodes_PG, self._sampled.completions, strict=True))
        return Rollout(
            [episodes[: len(completions_G)] for episodes, completions_G in groups],
            [
                None if bare is None else episodes[-1]
                for bare, episodes in zip(self._sampled.bare, self._episodes_PG, strict=True)
            ],
            self.renderer_metrics,
            self._reward_errors(),
            self._picture_outcomes(),
        )

    def _picture_outcomes(self) -> list[PictureOutcome]:
        found = []
        for picture in self._pictures if self._context.makes_images else ():
            reading = next(iter(picture.readings.values()))
            sample = reading.about.sample
            size_px = self._context.renderer.size_bucket(sample)
            if size_px is None and sample.sources:
                size_px = sample.sources[-1].size
            assert reading.verdict is not None
            found.append(picture_outcome(sample, size_px, reading.verdict))
        return [outcome for outcome in found if outcome is not None]

    def _reward_errors(self) -> dict[str, RewardErrors]:
        graded = self._graded()
        errors = {}
        for name in self._context.rewards if graded else ():
            raised = [grades[name].traceback for grades in graded if grades[name].traceback]
            errors[name] = RewardErrors(len(graded), len(raised), next(iter(raised), ""))
        return errors


def _reported(renderer: Renderer) -> Mapping[str, float] | Exception:
    """What it has to report of these pictures, or why not: no reason to lose them."""
    try:
        return renderer.take_metrics()
    except Exception as error:
        return error
