"""From completions to graded episodes: condition, render, judge, as one stream.

`begin` takes micro-batch after micro-batch through the policy's forward (one per group, prompt and
all completions together), hands its pictures to the renderer and each picture's questions to the
judge the moment it exists, while later ones render. Beside each group runs the bare arm: what the
user's own words alone would give, under the same noise.

Axes: `_P` prompts on this rank, `_G` completions in a group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from PIL.Image import Image

from rl.api.plug import shown
from rl.api.policy import Policy
from rl.api.renderer import Renderer
from rl.api.reward import Reward
from rl.api.types import Completion, Episode, Prompt, RenderFailure, RenderJob, RewardInput
from rl.config.schema import RunConfig
from rl.files.images import own_pictures
from rl.judge.background import BackgroundLoop
from rl.learner.micro_batches import Forwards, Member
from rl.ranks.seeding import derive_seed
from rl.record.console import PhaseTimer
from rl.record.progress import counted
from rl.rollout import grading
from rl.rollout.consensus import Interrupted
from rl.rollout.episodes import (
    Arm,
    PictureKey,
    PictureOutcome,
    Verdict,
    VerdictKey,
    episode_of,
    picture_outcome,
    why_not_rendered,
)
from rl.rollout.waiting import Waiting


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
            failure = why_not_rendered(context.config, completion, action)
            num_pictures = 0 if failure else context.config.images_per_completion
            ids = completion.token_ids
            source = ids if action.drawn_from is None else action.drawn_from
            verdicts = tuple(((p, source, m), ids) for m in range(num_pictures))
            # Without the payload: a batch's hidden states are a gigabyte beside the step.
            understood = replace(action, payload=None)
            arm = Arm(sampled.prompts[p], completion, understood, failure, verdicts)
            for key in pending.expect((p, g), arm):
                noise_seed = _noise(sampled.noise_seeds[p], key[2])
                yield RenderJob(own_pictures(arm.prompt.sample), action.payload, noise_seed)


def _noise(group_seed: int, picture: int) -> int:
    """The group's own seed for the first picture, derived ones for the others."""
    return group_seed if picture == 0 else derive_seed(group_seed, picture)


class PendingRollout:
    """A batch whose pictures have been made, or are being made, and whose verdicts come in."""

    def __init__(self, context: RolloutContext, sampled: Sampled) -> None:
        self.renderer_metrics: Mapping[str, float] | Exception = {}
        self._context = context
        self._sampled = sampled
        self._arms_P = sampled.arms
        self._arms: dict[Member, Arm] = {}
        self._arm_of: dict[VerdictKey, Arm] = {}
        """Any one of equal arms."""
        self._verdicts_on: dict[PictureKey, list[VerdictKey]] = {}
        self._handed_out: list[PictureKey] = []
        """To the renderer, in its order."""
        self._outcomes: dict[PictureKey, Image | RenderFailure | None] = {}
        self._seen: dict[PictureKey, Future[grading.Grades]] = {}
        """By the rewards that thoughts say nothing to."""
        self._read: dict[VerdictKey, Future[grading.Grades]] = {}
        """By the others."""
        self._compared: dict[tuple[int, int, bool], Future[list[grading.Grades]]] = {}
        """(prompt index, picture number, reads thoughts) -> of `_group_of` it, by `_comparing`."""
        comparing = {name: r for name, r in context.rewards.items() if r.scores_groups()}
        self._comparing: dict[bool, dict[str, Reward]] = {
            reads: {name: r for name, r in comparing.items() if r.reads_thoughts == reads}
            for reads in sorted({r.reads_thoughts for r in comparing.values()})
        }
        """The rewards that compare, by whether they read thoughts."""
        self._outputs: dict[VerdictKey, grading.Grades] = {}
        """Of the verdicts that are in."""
        self._episodes_PG: list[list[Episode]] = []

    @property
    def num_pictures(self) -> int:
        return len(self._handed_out)

    def expect(self, member: Member, arm: Arm) -> list[PictureKey]:
        """Note an arm; returns those of its pictures that no equal arm has asked for."""
        self._arms[member] = arm
        new = [key for key in arm.pictures if key not in self._verdicts_on]
        for verdict in arm.verdicts:
            if verdict not in self._arm_of:
                self._arm_of[verdict] = arm
                self._verdicts_on.setdefault(verdict[0], []).append(verdict)
                if verdict[0] in self._outcomes:
                    self._ask(verdict)
        self._handed_out += new
        return new

    def submit(self, number: int, outcome: Image | RenderFailure | None) -> None:
        """Picture `number` exists: its questions leave for the judge."""
        key = self._handed_out[number]
        # A renderer may draw the next one on the same canvas.
        self._outcomes[key] = outcome.copy() if isinstance(outcome, Image) else outcome
        for verdict in self._verdicts_on[key]:
            self._ask(verdict)
        self._submit_group(key[0])

    def _ask(self, verdict: VerdictKey) -> None:
        """The rewards about a picture that exists."""
        picture = verdict[0]
        if isinstance(self._outcomes[picture], RenderFailure):
            return
        rewards, loop = self._context.rewards, self._context.loop
        shown = self._input(verdict)
        if picture not in self._seen:
            seeing = {name: r for name, r in rewards.items() if not r.reads_thoughts}
            self._seen[picture] = loop.submit(grading.grade(seeing, shown))
        reading = {name: r for name, r in rewards.items() if r.reads_thoughts}
        self._read[verdict] = loop.submit(grading.grade(reading, shown))

    def submit_groups(self) -> None:
        """Every picture exists: what was left to compare leaves."""
        for p in range(len(self._sampled.prompts)):
            self._submit_group(p)

    def _submit_group(self, p: int) -> None:
        """Once all pictures of prompt `p` exist, those of one noise leave together."""
        members = [(p, g) for g in range(len(self._arms_P[p]))]
        if not self._comparing or not self._arms.keys() >= set(members):
            return
        pictures = {picture for picture, _ in self._verdicts_of(p)}
        if not self._outcomes.keys() >= pictures:
            return
        numbers = sorted({number for _, _, number in pictures})
        for number, (reads, rewards) in product(numbers, self._comparing.items()):
            group = self._group_of(p, number, reads)
            if group and (p, number, reads) not in self._compared:
                inputs_G = [self._input(key) for key in group.values()]
                self._compared[p, number, reads] = self._context.loop.submit(
                    grading.score_group(rewards, inputs_G)
                )

    def _verdicts_of(self, p: int) -> list[VerdictKey]:
        """Distinct ones, in the order of the completions."""
        arms = [self._arms[p, g] for g in range(len(self._arms_P[p]))]
        return list(dict.fromkeys(key for arm in arms for key in arm.verdicts))

    def _group_of(
        self, p: int, number: int, reads: bool
    ) -> dict[VerdictKey | PictureKey, VerdictKey]:
        """Those of them whose pictures exist under one noise, by what is one to a reward: the
        verdict where it `reads` thoughts, else the picture."""
        found: dict[VerdictKey | PictureKey, VerdictKey] = {}
        for key in self._verdicts_of(p):
            if key[0][2] == number and key in self._read:
                found.setdefault(key if reads else key[0], key)
        return found

    def _input(self, key: VerdictKey) -> RewardInput:
        arm, image = self._arm_of[key], self._outcomes[key[0]]
        assert not isinstance(image, RenderFailure)
        return RewardInput(arm.prompt.sample, arm.action.text, image, arm.action.thought)

    @property
    def _futures(self) -> list[Future[Any]]:
        return [*self._seen.values(), *self._read.values(), *self._compared.values()]

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
        assert len(self._outcomes) == self.num_pictures, "the renderer lost a job"
        sampled = self._sampled
        waiting = Waiting(self._futures, should_stop)
        try:
            for p, arms_G in enumerate(sampled.arms):
                arms = [self._arms[p, g] for g in range(len(arms_G))]
                with timer.phase("judge_wait") as phase:
                    verdicts = {
                        key: self._verdict(key, waiting) for arm in arms for key in arm.verdicts
                    }
                    if p == len(sampled.prompts) - 1:
                        phase.note(self._latency())
                config, group = self._context.config, (sampled.group_ids[p], sampled.noise_seeds[p])
                episodes = [episode_of(config, arm, *group, verdicts) for arm in arms]
                self._episodes_PG.append(episodes)
                yield p, episodes[: len(sampled.completions[p])]
        except BaseException:
            self.cancel()
            raise
        finally:
            waiting.end()

    def _verdict(self, key: VerdictKey, waiting: Waiting) -> Verdict:
        picture = key[0]
        outcome = self._outcomes[picture]
        if isinstance(outcome, RenderFailure):
            return Verdict(None, outcome)
        seen: grading.Grades = waiting.result(self._seen[picture])
        read: grading.Grades = waiting.result(self._read[key])
        grades = {**seen, **read}
        p, _, number = picture
        for reads in self._comparing:
            rows_G = waiting.result(self._compared[p, number, reads])
            group = list(self._group_of(p, number, reads))
            grades |= rows_G[group.index(key if reads else picture)]
        # In the config's order, whichever way they were asked.
        ordered = {name: grades[name] for name in self._context.rewards}
        self._outputs[key] = ordered
        return Verdict(outcome, None, ordered)

    def _latency(self) -> str:
        """'verdicts after 0.8 s (median), 2.1 s (longest)', or '' when nothing was graded."""
        seconds = sorted(
            max((output.seconds for output in grades.values()), default=0.0)
            for grades in self._outputs.values()
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
            {name: self._errors_of(name) for name in self._context.rewards if self._outputs},
            self._picture_outcomes(),
        )

    def _picture_outcomes(self) -> list[PictureOutcome]:
        if not self._context.makes_images:
            return []
        found = (self._picture_outcome(key) for key in self._handed_out)
        return [outcome for outcome in found if outcome is not None]

    def _picture_outcome(self, key: PictureKey) -> PictureOutcome | None:
        verdict, drawn = self._verdicts_on[key][0], self._outcomes[key]
        sample = self._arm_of[verdict].prompt.sample
        size_px = self._context.renderer.size_bucket(sample)
        if size_px is None and sample.sources:
            size_px = sample.sources[-1].size
        if isinstance(drawn, RenderFailure):
            return picture_outcome(sample, size_px, Verdict(None, drawn))
        return picture_outcome(sample, size_px, Verdict(drawn, None, self._outputs[verdict]))

    def _errors_of(self, name: str) -> RewardErrors:
        tracebacks = [grades[name].traceback for grades in self._outputs.values()]
        raised = [text for text in tracebacks if text]
        return RewardErrors(len(tracebacks), len(raised), next(iter(raised), ""))


def _reported(renderer: Renderer) -> Mapping[str, float] | Exception:
    """What it has to report of these pictures, or why not: no reason to lose them."""
    try:
        return renderer.take_metrics()
    except Exception as error:
        return error
