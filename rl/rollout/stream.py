"""Conditions, renders and judges as a stream; groups get their advantages as they are graded."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import astuple, dataclass, field, replace
from functools import cached_property
from statistics import fmean

from PIL.Image import Image

from rl.algorithm.grpo import RewardMoments, group_advantages, reward_moments
from rl.api.plugin import reported_by
from rl.api.policy import Policy
from rl.api.renderer import Renderer, drawn_problem
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
    TrainSequence,
)
from rl.config.schema import RunConfig
from rl.judge.http import BackgroundLoop
from rl.learner.train_step import Forwards
from rl.progress import PhaseTimer, Progress, counted
from rl.ranks.dist import Dist
from rl.rollout.episodes import (
    Grades,
    Interrupted,
    Outputs,
    PendingEpisode,
    Picture,
    PictureAndText,
    episode_of,
    own_copy,
    require_own_sample,
    scores,
    why_not_rendered,
)
from rl.seeds import derive_seed

# ---- stream --------------------------------------------------------------------------------------
# Turns completions into graded episodes: conditioning, rendering and judging overlap.
#
# Axes: `_P` prompts on this rank, `_G` completions in a group.

LISTEN_EVERY_S = 0.5
"""How often the wait for a grade checks whether the run was asked to stop."""


@dataclass(frozen=True)
class RolloutContext:
    """Everything needed to turn completions into graded episodes."""

    config: RunConfig
    policy: Policy
    renderer: Renderer
    rewards: Mapping[str, Reward]
    makes_images: bool
    """Whether the renderer draws pictures; if not, there is no bare variant."""
    loop: BackgroundLoop
    """Event loop that runs rewards and judge requests while this thread renders."""
    held_out_only: Mapping[str, Reward] = field(default_factory=dict)
    """Rewards that grade held-out pictures only, by name; `rewards` grade those as well."""

    @property
    def compares_pictures(self) -> bool:
        """Whether a reward compares the pictures of a group, so that it cannot grade a picture
        outside of a group."""
        return any(reward.scores_groups() for reward in self.rewards.values())


@dataclass(frozen=True, eq=False)
class Sampled:
    """Completions to render and judge. All completions of a group get the same noise."""

    prompts: Sequence[Prompt]
    """_P."""
    completions: Sequence[Sequence[Completion]]
    """_PG."""
    noise_seeds: Sequence[int]
    """_P."""
    group_ids: Sequence[str]
    """_P."""
    bare: Sequence[Completion | None]
    """_P, the bare variant; None where it was not requested or the policy has none."""

    @cached_property
    def with_bare(self) -> list[list[Completion]]:
        """_P: each group's completions, followed by its bare variant if it has one."""
        return [
            [*completions_G, *([] if bare is None else [bare])]
            for completions_G, bare in zip(self.completions, self.bare, strict=True)
        ]

    @property
    def token_ids(self) -> list[list[tuple[int, ...]]]:
        """_P: token ids of `with_bare`, the input of the policy's forward."""
        return [[completion.token_ids for completion in each_G] for each_G in self.with_bare]


@dataclass(frozen=True)
class Rollout:
    """The episodes of a batch of completions."""

    episodes: list[list[Episode]]
    """_PG, in the order of the completions."""
    bare_episodes: list[Episode | None]
    """_P, the bare variant, never trained; None where it was not requested or there is none."""
    renderer_metrics: Mapping[str, float] | Exception = field(default_factory=dict)
    """The renderer's own metrics, as means over these pictures."""
    num_drawn: int = 0
    """Distinct pictures that the renderer drew."""
    render_failures: Sequence[str] = ()
    """A reason for each picture that the renderer failed to draw; policy failures not included."""


def begin(
    context: RolloutContext,
    sampled: Sampled,
    forwards: Forwards,
    timer: PhaseTimer,
    should_stop: Callable[[], bool],
) -> PendingRollout:
    """Render every completion and submit it to the rewards; returns before all grades have arrived.

    Completions of a group with equal words share one picture. It is rendered once, and graded once
    unless their thoughts differ and a reward reads thoughts. Raises `Interrupted` soon after
    `should_stop()` turns true: a pre-empted run may have no time to render all pictures.
    """
    with timer.phase("render") as phase:
        samples_P = [own_copy(prompt.sample) for prompt in sampled.prompts]
        decoded_P = context.renderer.decode_sources(samples_P)
        for prompt, decoded in zip(sampled.prompts, decoded_P, strict=True):
            require_own_sample(prompt, decoded, "decoded")
        prompts_P = [
            prompt if decoded is sample else replace(prompt, sample=decoded)
            for prompt, sample, decoded in zip(sampled.prompts, samples_P, decoded_P, strict=True)
        ]
        pending = PendingRollout(context, replace(sampled, prompts=prompts_P))
        jobs: Iterable[RenderJob] = _jobs(context.policy, forwards, pending, timer, should_stop)
        if forwards.collective:
            jobs = list(jobs)
        num_distinct = sum(len(set(ids_G)) for ids_G in sampled.token_ids)
        # Fewer if completions with other thoughts share words.
        most_drawn = num_distinct * context.config.images_per_completion
        try:
            with counted("pictures" if context.makes_images else "answers", most_drawn) as progress:
                for drawn in context.renderer.render(jobs):
                    if should_stop():
                        raise Interrupted
                    pending.submit(drawn)
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
    """Yield a job per picture; a micro-batch's forward runs when its first job is requested."""
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
        self._pending_PG: list[list[PendingEpisode | None]] = [
            [None] * len(ids_G) for ids_G in sampled.token_ids
        ]
        """One per completion; None until its action is known."""
        self._pictures: dict[tuple[int, tuple[int, ...], int], Picture] = {}
        """(prompt index, token ids from which the picture is drawn, picture number) -> picture, in
        the order in which they are passed to the renderer."""
        self._undrawn: dict[int, Picture] = {}
        """Pictures that the renderer has not drawn yet, by their places in that order."""
        self._outputs: dict[tuple[str, Picture | PictureAndText], tuple[Future[Outputs], int]] = {}
        """(reward name, what it grades once) -> the call that grades it, and the index of its
        output in the list that the call returns."""
        self._episodes_PG: list[list[Episode]] = []

    @property
    def num_pictures(self) -> int:
        return len(self._pictures)

    @property
    def _futures(self) -> set[Future[Outputs]]:
        """All calls of rewards."""
        return {future for future, _ in self._outputs.values()}

    def expect(self, p: int, g: int, action: Action) -> list[RenderJob]:
        """Store a completion's action; returns a job for each of its pictures that no earlier
        completion shares."""
        config, sampled, prompt = self._context.config, self._sampled, self._sampled.prompts[p]
        completion = sampled.with_bare[p][g]
        ids = completion.token_ids
        failure = why_not_rendered(config, completion, action)
        drawn_ids = ids if action.drawn_from is None else action.drawn_from
        base_input = RewardInput(prompt.sample, action.text, None, action.thought)
        jobs, pairs = [], []
        for number in range(0 if failure else config.images_per_completion):
            picture = self._pictures.setdefault((p, drawn_ids, number), Picture(p, number))
            if not picture.pairs:  # the first completion that shares it
                self._undrawn[len(self._pictures) - 1] = picture
                seed = sampled.noise_seeds[p]
                noise_seed = derive_seed(seed, number) if number else seed
                job = RenderJob(own_copy(prompt.sample), action.payload, noise_seed)
                picture.drawn_of = job.sample
                jobs.append(job)
            pairs.append(picture.pairs.setdefault(ids, PictureAndText(picture, base_input)))
        # Drop the payload: a batch's hidden states would hold a gigabyte during the training step.
        action = replace(action, payload=None)
        self._pending_PG[p][g] = PendingEpisode(prompt, completion, action, failure, pairs)
        self._grade(p)
        return jobs

    def submit(self, drawn: tuple[int, Image | RenderFailure | None]) -> None:
        """Store job `drawn[0]`'s picture, failure or None (nothing is drawn), and submit it to the
        rewards."""
        if problem := drawn_problem(drawn, self._undrawn, self._context.makes_images):
            raise TypeError(f"renderer: {self._context.config.renderer['type']} {problem}")
        number, outcome = drawn
        picture = self._undrawn.pop(number)
        # Copy it: a renderer may draw its next picture into the same image object.
        picture.outcome = outcome.copy() if isinstance(outcome, Image) else outcome
        picture.has_outcome = True
        self._grade(picture.p)

    def _grade(self, p: int) -> None:
        """Submit a prompt's ungraded pictures. A reward that compares pictures gets them once all
        exist, in one call for each noise; others get each at once."""
        pairs = self._pairs(p)
        is_complete = None not in self._pending_PG[p] and all(x.picture.has_outcome for x in pairs)
        for name, reward in self._context.rewards.items():
            compares = reward.scores_groups()
            if compares and not is_complete:
                continue
            calls: dict[object, dict[Picture | PictureAndText, RewardInput]] = {}
            for pair in pairs:
                unit = pair.grading_unit(reward)
                if pair.can_be_graded and (name, unit) not in self._outputs:
                    together = pair.picture.number if compares else unit
                    calls.setdefault(together, {}).setdefault(unit, pair.reward_input)
            for inputs in calls.values():
                self._call_reward(name, reward, inputs)

    def _call_reward(
        self, name: str, reward: Reward, inputs: Mapping[Picture | PictureAndText, RewardInput]
    ) -> None:
        unreadable = self._context.config.judge.unreadable
        may_refuse = name in self._context.held_out_only
        call = scores(reward, list(inputs.values()), unreadable, may_refuse)
        future = self._context.loop.submit(call)
        for index, unit in enumerate(inputs):
            self._outputs[name, unit] = future, index

    def _pairs(self, p: int) -> list[PictureAndText]:
        """A prompt's distinct pictures with texts so far, in the order of its completions."""
        known = [each for each in self._pending_PG[p] if each is not None]
        return list(dict.fromkeys(pair for each in known for pair in each.pairs))

    def cancel(self) -> None:
        for future in self._futures:
            future.cancel()

    def still_waiting(self) -> bool:
        """Whether a call of a reward has not finished."""
        return self._num_done() < len(self._futures)

    def _num_done(self) -> int:
        return sum(future.done() for future in self._futures)

    def groups(
        self, timer: PhaseTimer, should_stop: Callable[[], bool]
    ) -> Iterator[tuple[int, list[Episode]]]:
        """Yield (p, episodes of prompt p) in order, each as soon as its last grade has arrived.

        Raises `JudgeRefused` if the judge is set up wrongly; if the judge is down, episodes are
        UNGRADED. Raises `Interrupted` soon after `should_stop()` turns true.
        """
        sampled, config = self._sampled, self._context.config
        num_not_taken = sum(pending_G.count(None) for pending_G in self._pending_PG)
        if self._undrawn or num_not_taken:
            raise ValueError(
                f"renderer: {config.renderer['type']} yields no picture for "
                f"{len(self._undrawn)} of {len(self._pictures)} jobs, and takes none for "
                f"{num_not_taken} completions"
            )
        try:
            with counted("grades", len(self._futures), self._num_done()) as progress:
                for p, pending_G in enumerate(self._pending_PG):
                    with timer.phase("judge_wait"):
                        for pair in self._pairs(p):
                            pair.grades = self._grades(pair, progress, should_stop)
                        group = sampled.group_ids[p], sampled.noise_seeds[p]
                        episodes = [episode_of(config, each, *group) for each in pending_G if each]
                        self._episodes_PG.append(episodes)
                    yield p, episodes[: len(sampled.completions[p])]
        except BaseException:
            self.cancel()
            raise

    def _grades(
        self, pair: PictureAndText, progress: Progress, should_stop: Callable[[], bool]
    ) -> Grades:
        """Wait for the grades of a picture with its text; {} if there is no picture."""
        if not pair.can_be_graded:
            return {}
        grades: dict[str, RewardOutput] = {}
        for name, reward in self._context.rewards.items():
            future, index = self._outputs[name, pair.grading_unit(reward)]
            while not should_stop() and not wait([future], timeout=LISTEN_EVERY_S).done:
                progress.at(self._num_done())
            if should_stop():
                raise Interrupted
            grades[name] = future.result()[index]
        return grades

    def finished(self) -> Rollout:
        """The rollout, after `groups` has yielded every group."""
        groups = list(zip(self._episodes_PG, self._sampled.completions, strict=True))
        outcomes = [picture.outcome for picture in self._pictures.values()]
        failures = [outcome for outcome in outcomes if isinstance(outcome, RenderFailure)]
        return Rollout(
            episodes=[episodes[: len(completions_G)] for episodes, completions_G in groups],
            bare_episodes=[
                None if bare is None else episodes[-1]
                for bare, episodes in zip(self._sampled.bare, self._episodes_PG, strict=True)
            ],
            renderer_metrics=self.renderer_metrics,
            num_drawn=sum(isinstance(outcome, Image) for outcome in outcomes),
            render_failures=[f.reason for f in failures if f.blame == "renderer"],
        )


# ---- graded groups -------------------------------------------------------------------------------
# Turns a group's episodes into advantages and training sequences.
#
# Axes: `_P` prompts on this rank, `_G` completions in a group.


@dataclass(frozen=True, eq=False)
class GradedGroup:
    """One prompt's completions with their rewards and advantages."""

    p: int
    """Number of the prompt on this rank."""
    episodes: Sequence[Episode]
    """_G."""
    advantages: Sequence[float | None]
    """_G; None where the reward used is missing: that of an UNGRADED episode or, with
    `shuffle_rewards`, one that was given such a reward."""
    sequences: Sequence[TrainSequence | None]
    """_G; None for an episode that is not in the loss."""


class Advantages:
    """Computes one iteration's advantages. Groups are usually independent; with `advantage_scale:
    'batch_std'` or `shuffle_rewards`, all groups wait until the last one is graded."""

    def __init__(self, config: RunConfig, policy: Policy, iteration: int, dist: Dist) -> None:
        self._config = config
        self._policy = policy
        self._iteration = iteration
        self._dist = dist
        self._waiting: list[tuple[int, Sequence[Episode]]] = []

    def add(self, p: int, episodes_G: Sequence[Episode]) -> Iterator[GradedGroup]:
        """Yields the group, or nothing if it must wait for the other groups."""
        if self._needs_whole_batch:
            self._waiting.append((p, episodes_G))
        else:
            yield self._graded(p, episodes_G, [episode.reward for episode in episodes_G])

    def rest(self) -> Iterator[GradedGroup]:
        """Yields the groups that waited. Collective, to be called when every rank has added all."""
        if not self._needs_whole_batch:
            return
        rewards_PG = [[episode.reward for episode in group] for _, group in self._waiting]
        moments = reward_moments(rewards_PG)
        batch_moments = RewardMoments(*self._dist.sum_floats(astuple(moments)))
        if self._config.algorithm.shuffle_rewards:
            seed = derive_seed(self._config.seed, "shuffle", self._iteration)
            rewards_PG = _shuffled(rewards_PG, seed, self._dist)
        for (p, episodes_G), rewards_G in zip(self._waiting, rewards_PG, strict=True):
            yield self._graded(p, episodes_G, rewards_G, batch_moments)

    @property
    def _needs_whole_batch(self) -> bool:
        algorithm = self._config.algorithm
        return algorithm.shuffle_rewards or algorithm.advantage_scale == "batch_std"

    def _graded(
        self,
        p: int,
        episodes_G: Sequence[Episode],
        rewards_G: Sequence[float | None],
        batch: RewardMoments | None = None,
    ) -> GradedGroup:
        algorithm = self._config.algorithm
        advantages_G = group_advantages(
            rewards_G, algorithm.advantage_scale, algorithm.advantage_eps, batch
        )
        sequences_G = train_sequences(
            self._config, self._policy, self._iteration, episodes_G, advantages_G
        )
        mean = fmean([reward for reward in rewards_G if reward is not None] or [0.0])
        marked_G = [
            None if sequence is None or reward is None else replace(sequence, excess=reward - mean)
            for sequence, reward in zip(sequences_G, rewards_G, strict=True)
        ]
        return GradedGroup(p, episodes_G, advantages_G, marked_G)


def train_sequences(
    config: RunConfig,
    policy: Policy,
    iteration: int,
    episodes_G: Sequence[Episode],
    advantages_G: Sequence[float | None],
) -> list[TrainSequence | None]:
    """The training sequence of each of a group's completions; None if it is not in the loss.

    UNGRADED episodes are not in the loss. A group with zero spread is left out ('drop'), or has
    only its KL in the loss; 'keep' also counts it in the denominators. Forced tokens, tokens
    outside `policy.loss_mask`, and with `truncated_completions: 'mask'` all tokens of a truncated
    completion are attended to but have no loss.
    """
    algorithm = config.algorithm
    has_spread = any(a is not None and a != 0 for a in advantages_G)
    rule = algorithm.zero_spread_groups
    if not has_spread and (rule == "drop" or (rule == "kl_only" and not algorithm.kl_coeff)):
        return [None] * len(episodes_G)
    counted = has_spread or rule == "keep"
    mask_truncated = algorithm.truncated_completions == "mask"
    sequences_G: list[TrainSequence | None] = []
    for episode, advantage in zip(episodes_G, advantages_G, strict=True):
        if advantage is None:
            sequences_G.append(None)
            continue
        completion = episode.completion
        masked = mask_truncated and completion.finish == "length"
        forced = completion.forced or (False,) * len(completion.token_ids)
        mask = policy.loss_mask(completion, iteration)
        loss_mask = tuple(m and not f and not masked for m, f in zip(mask, forced, strict=True))
        sequences_G.append(TrainSequence(loss_mask, advantage, completion.logprobs, counted))
    return sequences_G


def _shuffled(
    rewards_PG: Sequence[Sequence[float | None]], seed: int, dist: Dist
) -> list[list[float | None]]:
    """The control run: this rank's part of all ranks' rewards in random order."""
    global_PG = [row for rank in dist.gather([list(row) for row in rewards_PG]) for row in rank]
    rewards = [reward for row in global_PG for reward in row]
    random.Random(seed).shuffle(rewards)
    start = dist.rank * len(rewards_PG)
    taken = iter(rewards)
    return [[next(taken) for _ in row] for row in global_PG][start : start + len(rewards_PG)]
