"""Turns completions into graded episodes: condition, render and judge as one stream.

Axes: `_P` prompts on this rank, `_G` completions in a group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace

from PIL.Image import Image

from rl.api.plugin import reported_by, shown
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
)
from rl.config.schema import RunConfig
from rl.console.console import PhaseTimer
from rl.console.progress import Progress, counted
from rl.files.images import own_pictures
from rl.judge.background import BackgroundLoop
from rl.learner.micro_batches import Forwards
from rl.ranks.seeding import derive_seed
from rl.rollout.consensus import Interrupted
from rl.rollout.episodes import Arm, Picture, Reading, Verdict, episode_of, why_not_rendered
from rl.rollout.grading import Outputs, scores

LISTEN_EVERY_S = 0.5
"""How often the wait for a verdict checks whether the run was asked to stop."""


@dataclass(frozen=True)
class RolloutContext:
    """Everything needed to turn completions into graded episodes."""

    config: RunConfig
    policy: Policy
    renderer: Renderer
    rewards: Mapping[str, Reward]
    makes_images: bool
    """Whether the renderer draws pictures; without pictures there is no bare arm."""
    loop: BackgroundLoop
    """Event loop that runs the judge's coroutines while this thread renders."""


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
    """_P, the bare arm; None where it was not requested or the policy has none."""

    @property
    def arms(self) -> list[list[Completion]]:
        """_P, each group's completions, followed by its bare arm if it has one."""
        return [
            [*completions_G, *([] if bare is None else [bare])]
            for completions_G, bare in zip(self.completions, self.bare, strict=True)
        ]

    @property
    def token_ids(self) -> list[list[tuple[int, ...]]]:
        """_P, token ids of every arm: the input of the policy's forward."""
        return [[completion.token_ids for completion in arms_G] for arms_G in self.arms]


@dataclass(frozen=True)
class Rollout:
    """The episodes of a batch of completions."""

    episodes: list[list[Episode]]
    """_PG, in the order of the completions."""
    bare_episodes: list[Episode | None]
    """_P, the bare arm, never trained; None where it was not requested or the policy has none."""
    renderer_metrics: Mapping[str, float] | Exception = field(default_factory=dict)
    """The renderer's own metrics, as means over these pictures."""
    num_drawn: int = 0
    """Distinct pictures that the renderer drew."""
    render_failures: Sequence[str] = ()
    """Why the renderer failed to draw the others, one reason each; policy failures left out."""


def begin(
    context: RolloutContext,
    sampled: Sampled,
    forwards: Forwards,
    timer: PhaseTimer,
    should_stop: Callable[[], bool],
) -> PendingRollout:
    """Render every arm and submit it to the rewards; returns before all verdicts have arrived.

    Completions of a group with equal words share one picture. It is rendered once, and judged once
    unless their thoughts differ and a reward reads thoughts. Raises `Interrupted` soon after
    `should_stop()` turns true, as rendering may take longer than a pre-empted run has left.
    """
    with timer.phase("render") as phase:
        own_P = [own_pictures(prompt.sample) for prompt in sampled.prompts]
        decoded_P = context.renderer.decode_sources(own_P)
        prompts_P = [
            prompt if decoded is own else replace(prompt, sample=decoded)
            for prompt, own, decoded in zip(sampled.prompts, own_P, decoded_P, strict=True)
        ]
        pending = PendingRollout(context, replace(sampled, prompts=prompts_P))
        jobs: Iterable[RenderJob] = _jobs(context.policy, forwards, pending, timer, should_stop)
        if forwards.collective:
            jobs = list(jobs)
        num_different = sum(len({c.token_ids for c in arms_G}) for arms_G in sampled.arms)
        at_most = num_different * context.config.images_per_completion
        try:
            with counted("pictures" if context.makes_images else "answers", at_most) as progress:
                for number, outcome in context.renderer.render(jobs):
                    if should_stop():
                        raise Interrupted
                    pending.submit(number, outcome)
                    progress.step()
        except BaseException:
            pending.cancel()
            raise
        if context.makes_images:
            phase.note(f"{pending.num_pictures} pictures")
    pending.renderer_metrics = reported_by(context.renderer)
    return pending


def _jobs(
    policy: Policy,
    forwards: Forwards,
    pending: PendingRollout,
    timer: PhaseTimer,
    should_stop: Callable[[], bool],
) -> Iterator[RenderJob]:
    """The pictures to render; a micro-batch's forward runs when its first picture is requested."""
    for micro_batch in forwards.micro_batches:
        if should_stop() and not forwards.collective:
            raise Interrupted
        with timer.phase("condition"):
            batch, outputs = forwards.states(micro_batch) if policy.reads_states else (None, None)
            actions = policy.decode_actions(micro_batch.rows, batch, outputs)
            del batch, outputs
        for (p, g), action in zip(micro_batch.members, actions, strict=True):
            if p >= 0:  # p < 0: a filler row
                yield from pending.expect(p, g, action)


class PendingRollout:
    """A batch whose pictures are being rendered and graded."""

    def __init__(self, context: RolloutContext, sampled: Sampled) -> None:
        self.renderer_metrics: Mapping[str, float] | Exception = {}
        self._context = context
        self._sampled = sampled
        self._completions_PG = sampled.arms
        self._arms_PG: list[list[Arm | None]] = [[None] * len(arms_G) for arms_G in sampled.arms]
        """For each of these completions its `Arm`; None until its action is known."""
        self._distinct: dict[tuple[int, tuple[int, ...], int], Picture] = {}
        """(Prompt index, token ids that it is drawn from, picture number) -> picture."""
        self._pictures: list[Picture] = []
        """The same pictures in the order in which the renderer gets them."""
        self._outputs: dict[tuple[str, Picture | Reading], tuple[Future[Outputs], int]] = {}
        """(Reward name, picture or reading) -> the call that grades it, and the index of its output
        in the list that the call returns."""
        self._futures: list[Future[Outputs]] = []
        """Every call of a reward."""
        self._episodes_PG: list[list[Episode]] = []

    @property
    def num_pictures(self) -> int:
        return len(self._pictures)

    def expect(self, p: int, g: int, action: Action) -> list[RenderJob]:
        """Store a completion's action; returns jobs for those of its pictures that no equal
        completion has requested."""
        config, sampled, prompt = self._context.config, self._sampled, self._sampled.prompts[p]
        completion = self._completions_PG[p][g]
        ids = completion.token_ids
        failure = why_not_rendered(config, completion, action)
        source_ids = ids if action.drawn_from is None else action.drawn_from
        about = RewardInput(prompt.sample, action.text, None, action.thought)
        jobs, readings = [], []
        for number in range(0 if failure else config.images_per_completion):
            picture = self._distinct.setdefault((p, source_ids, number), Picture(p, number))
            if not picture.readings:
                self._pictures.append(picture)
                seed = sampled.noise_seeds[p]
                noise_seed = derive_seed(seed, number) if number else seed
                jobs.append(RenderJob(own_pictures(prompt.sample), action.payload, noise_seed))
            if ids not in picture.readings:
                picture.readings[ids] = Reading(picture, about)
                self._grade(picture.readings[ids])
            readings.append(picture.readings[ids])
        # Drop the payload: a batch's hidden states would hold a gigabyte during the training step.
        action = replace(action, payload=None)
        self._arms_PG[p][g] = Arm(prompt, completion, action, failure, readings)
        self._compare(p)
        return jobs

    def submit(self, number: int, outcome: Image | RenderFailure | None) -> None:
        """Store picture `number`, or its failure, and submit it to the rewards."""
        is_right = outcome is None and not self._context.makes_images
        if not is_right and not isinstance(outcome, Image | RenderFailure):
            raise TypeError(
                f"renderer: {self._context.config.renderer['type']} draws {shown(outcome)}; "
                "expected an RGB picture of PIL, or a RenderFailure"
            )
        picture = self._pictures[number]
        # Copy it: a renderer may draw its next picture into the same image object.
        picture.outcome = outcome.copy() if isinstance(outcome, Image) else outcome
        picture.is_made = True
        for reading in picture.readings.values():
            self._grade(reading)
        self._compare(picture.p)

    def _grade(self, reading: Reading) -> None:
        """Submit a reading to the rewards that grade single pictures, once its picture exists."""
        if not reading.can_be_graded:
            return
        for name, reward in self._context.rewards.items():
            graded = reading.seen_by(reward)
            if not reward.scores_groups() and (name, graded) not in self._outputs:
                self._ask(name, reward, {graded: reading.reward_input})

    def _compare(self, p: int) -> None:
        """Submit a prompt's pictures to the rewards that compare pictures, once all of them exist.
        Each call gets the pictures that share their noise."""
        readings = self._readings(p)
        is_complete = None not in self._arms_PG[p]
        if not (is_complete and all(reading.picture.is_made for reading in readings)):
            return
        for name, reward in self._context.rewards.items():
            if not reward.scores_groups():
                continue
            for number in range(self._context.config.images_per_completion):
                group: dict[Picture | Reading, RewardInput] = {}
                for reading in readings:
                    if reading.picture.number == number and reading.can_be_graded:
                        group.setdefault(reading.seen_by(reward), reading.reward_input)
                if group:
                    self._ask(name, reward, group)

    def _ask(
        self, name: str, reward: Reward, inputs: Mapping[Picture | Reading, RewardInput]
    ) -> None:
        future = self._context.loop.submit(scores(name, reward, list(inputs.values())))
        self._futures.append(future)
        for place, graded in enumerate(inputs):
            self._outputs[name, graded] = future, place

    def _readings(self, p: int) -> list[Reading]:
        """A prompt's distinct readings so far, in the order of its completions."""
        arms = [arm for arm in self._arms_PG[p] if arm is not None]
        return list(dict.fromkeys(reading for arm in arms for reading in arm.readings))

    def cancel(self) -> None:
        for future in self._futures:
            future.cancel()

    def still_waiting(self) -> bool:
        """Whether a verdict is missing."""
        return self._num_done() < len(self._futures)

    def _num_done(self) -> int:
        return sum(future.done() for future in self._futures)

    def groups(
        self, timer: PhaseTimer, should_stop: Callable[[], bool]
    ) -> Iterator[tuple[int, list[Episode]]]:
        """Yield (p, episodes of prompt p) in order, each as soon as its last verdict has arrived.

        Raises `JudgeRefused` if the judge is set up wrongly; if the judge is down,
        episodes are left UNGRADED. Raises `Interrupted` soon after `should_stop()` turns true.
        """
        assert all(picture.is_made for picture in self._pictures), "the renderer lost a job"
        sampled, config = self._sampled, self._context.config
        try:
            with counted("verdicts", len(self._futures), self._num_done()) as progress:
                for p, arms_G in enumerate(self._arms_PG):
                    with timer.phase("judge_wait") as phase:
                        for reading in self._readings(p):
                            reading.verdict = self._verdict(reading, progress, should_stop)
                        group = sampled.group_ids[p], sampled.noise_seeds[p]
                        episodes = [episode_of(config, arm, *group) for arm in arms_G if arm]
                        self._episodes_PG.append(episodes)
                        if p == len(sampled.prompts) - 1:
                            phase.note(self._latency())
                    yield p, episodes[: len(sampled.completions[p])]
        except BaseException:
            self.cancel()
            raise

    def _verdict(
        self, reading: Reading, progress: Progress, should_stop: Callable[[], bool]
    ) -> Verdict:
        outcome = reading.picture.outcome
        if isinstance(outcome, RenderFailure):
            return Verdict(None, outcome)
        grades = {}
        for name, reward in self._context.rewards.items():
            future, place = self._outputs[name, reading.seen_by(reward)]
            while not should_stop():
                if wait([future], timeout=LISTEN_EVERY_S).done:
                    break
                progress.at(self._num_done())
            else:
                raise Interrupted
            grades[name] = future.result()[place]
        return Verdict(outcome, None, grades)

    def _latency(self) -> str:
        """'verdicts after 0.8 s (median), 2.1 s (longest)', or '' when nothing was graded."""
        episodes = [episode for episodes_G in self._episodes_PG for episode in episodes_G]
        seconds = sorted(episode.judge_s for episode in episodes if episode.judge_s)
        if not seconds:
            return ""
        median_s = seconds[len(seconds) // 2]
        return f"verdicts after {median_s:.1f} s (median), {seconds[-1]:.1f} s (longest)"

    def finished(self) -> Rollout:
        groups = list(zip(self._episodes_PG, self._sampled.completions, strict=True))
        outcomes = [picture.outcome for picture in self._pictures]
        failures = [outcome for outcome in outcomes if isinstance(outcome, RenderFailure)]
        return Rollout(
            [episodes[: len(completions_G)] for episodes, completions_G in groups],
            [
                None if bare is None else episodes[-1]
                for bare, episodes in zip(self._sampled.bare, self._episodes_PG, strict=True)
            ],
            self.renderer_metrics,
            sum(isinstance(outcome, Image) for outcome in outcomes),
            [failure.reason for failure in failures if failure.blame == "renderer"],
        )
