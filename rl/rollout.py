"""From completions to graded episodes, and from graded episodes to what the learner eats.

What: act (one conditioning forward per group) -> render -> judge as a stream: a picture's questions
leave for the judge the moment it exists, while later pictures render. Beside each group runs the
baseline arm: what the user's own words alone would give, under the same noise. What not: sampling
(engines), advantages (algorithm), the update (learner). Called by `train.py` and `evaluate.py`.

Axes: `_P` prompts on this rank, `_G` completions in a group.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rl.algorithm.compose import compose
from rl.config import RunConfig
from rl.contracts import Policy, Renderer, Reward
from rl.system.seeding import derive_seed
from rl.types import (
    Action,
    Completion,
    Episode,
    Evidence,
    Grade,
    Prompt,
    RenderFailure,
    RenderJob,
    Status,
    TrainSequence,
)

if TYPE_CHECKING:
    from PIL.Image import Image

    from rl.system.background import BackgroundLoop
    from rl.system.console import PhaseTimer


@dataclass(frozen=True)
class Crew:
    """Everything that turns completions into graded episodes."""

    config: RunConfig
    policy: Policy
    renderer: Renderer
    rewards: Mapping[str, Reward]
    makes_images: bool
    """Whether the renderer draws at all: without pictures there is no baseline arm."""
    loop: BackgroundLoop
    """Where the judge's coroutines run while this thread renders."""


@dataclass(frozen=True)
class Rollout:
    """What a batch of completions came to."""

    episodes: list[list[Episode]]
    """_PG, in the order of the completions."""
    baselines: list[Episode | None]
    """_P, the baseline arm, never trained; None where nobody asked or the policy has none."""
    renderer_stats: Mapping[str, float] = field(default_factory=dict)
    """What the renderer reported of these pictures, means over them."""


PictureKey = tuple[int, tuple[int, ...], int]
"""(prompt index, completion's token ids, picture number): equal keys are one picture."""


@dataclass(frozen=True)
class _Verdict:
    """One picture with the grades it got, or why there is none."""

    image: Image | None
    failure: RenderFailure | None = None
    grades: Mapping[str, Grade] = field(default_factory=dict)


@dataclass(frozen=True)
class _Arm:
    """One completion on its way to an episode."""

    prompt: Prompt
    completion: Completion
    action: Action
    failure: str | None
    """Why nothing is rendered."""
    pictures: tuple[PictureKey, ...]
    """To be rendered; none when it failed."""


class Interrupted(Exception):  # noqa: N818 (reads as what happened)
    """Asked to stop while pictures were made or graded: these completions have no episodes."""


def _never() -> bool:
    return False


def collect(
    crew: Crew,
    prompts_P: Sequence[Prompt],
    completions_PG: Sequence[Sequence[Completion]],
    noise_seeds_P: Sequence[int],
    group_ids_P: Sequence[str],
    timer: PhaseTimer,
    should_stop: Callable[[], bool] = _never,
    baseline: bool = False,
) -> Rollout:
    """Render and grade every completion and, with `baseline`, the policy's bare ones.

    All completions of a group share their noise. Two equal completions of a group are one picture:
    it is rendered and judged once. Raises what the judge refuses (`JudgeRefused`): a judge that is
    set up wrongly stops the run, a judge that is down leaves episodes UNGRADED. Raises
    `Interrupted` soon after `should_stop()` turns true: rendering may take longer than a pre-empted
    run is given.
    """
    with timer.phase("condition"):
        prompts_P = _illustrated(crew, prompts_P)
        bare_P = [crew.policy.bare_completion(p.sample) if baseline else None for p in prompts_P]
        arms_PG = [
            _arms(crew, p, prompt, completions_G, bare)
            for p, (prompt, completions_G, bare) in enumerate(
                zip(prompts_P, completions_PG, bare_P, strict=True)
            )
        ]
    jobs: dict[PictureKey, tuple[RenderJob, str]] = {}
    for arms_G, seed in zip(arms_PG, noise_seeds_P, strict=True):
        for arm in arms_G:
            for key in arm.pictures:
                job = RenderJob(arm.prompt.sample, arm.action.payload, _noise(seed, key[2]))
                jobs.setdefault(key, (job, arm.action.text))
    verdicts = _render_and_grade(crew, jobs, timer, should_stop)
    graded_PG = [
        [_episode(crew.config, arm, group_id, seed, verdicts) for arm in arms_G]
        for arms_G, group_id, seed in zip(arms_PG, group_ids_P, noise_seeds_P, strict=True)
    ]
    return Rollout(
        [row[: len(group)] for row, group in zip(graded_PG, completions_PG, strict=True)],
        [None if bare is None else row[-1] for row, bare in zip(graded_PG, bare_P, strict=True)],
        crew.renderer.take_stats(),
    )


def _illustrated(crew: Crew, prompts_P: Sequence[Prompt]) -> list[Prompt]:
    """The prompts, with the pictures that their samples hold as codes drawn."""
    samples_P = crew.renderer.illustrate([prompt.sample for prompt in prompts_P])
    return [
        prompt if sample is prompt.sample else replace(prompt, sample=sample)
        for prompt, sample in zip(prompts_P, samples_P, strict=True)
    ]


def _arms(
    crew: Crew,
    p: int,
    prompt: Prompt,
    completions_G: Sequence[Completion],
    bare: Completion | None,
) -> list[_Arm]:
    """The group, and its baseline arm last, which is conditioned in a forward of its own: a batch
    mate would move the group's numbers by float rounding."""
    completions = [*completions_G, *([] if bare is None else [bare])]
    actions = crew.policy.act(prompt, completions_G)
    if bare is not None:
        actions = [*actions, *crew.policy.act(prompt, [bare])]
    arms = []
    for completion, action in zip(completions, actions, strict=True):
        failure = _why_not_rendered(crew.config, completion, action)
        num_pictures = 0 if failure else crew.config.images_per_completion
        keys = tuple((p, completion.token_ids, m) for m in range(num_pictures))
        arms.append(_Arm(prompt, completion, action, failure, keys))
    return arms


def _noise(group_seed: int, picture: int) -> int:
    """The group's own seed for the first picture, derived ones for the others."""
    return group_seed if picture == 0 else derive_seed(group_seed, picture)


def _why_not_rendered(config: RunConfig, completion: Completion, action: Action) -> str | None:
    if action.failure is not None:
        return action.failure
    if completion.finish == "length" and config.algorithm.truncated_completions == "floor":
        return "truncated: hit sampling.max_completion_tokens"
    return None


def _render_and_grade(
    crew: Crew,
    jobs: Mapping[PictureKey, tuple[RenderJob, str]],
    timer: PhaseTimer,
    should_stop: Callable[[], bool],
) -> dict[PictureKey, _Verdict]:
    """Every job's verdict; grading of early pictures overlaps the rendering of late ones."""
    keys = list(jobs)
    images: dict[PictureKey, Image | None] = {}
    failures: dict[PictureKey, RenderFailure] = {}
    pending: dict[PictureKey, Future[dict[str, Grade]]] = {}
    try:
        with timer.phase("render") as phase:
            if crew.makes_images:
                phase.note(f"{len(keys)} pictures")
            if should_stop():  # the first batch alone may take minutes
                raise Interrupted
            for index, outcome in crew.renderer.render([jobs[key][0] for key in keys]):
                if should_stop():
                    raise Interrupted
                key = keys[index]
                if isinstance(outcome, RenderFailure):
                    failures[key] = outcome
                    continue
                images[key] = outcome
                job, text = jobs[key]
                evidence = Evidence(job.sample, text, outcome)
                pending[key] = crew.loop.submit(_grade(crew.rewards, evidence))
        assert len(images) + len(failures) == len(keys), "the renderer lost a job"
        with timer.phase("judge_wait") as phase:
            grades = {key: _wait_for(future, should_stop) for key, future in pending.items()}
            phase.note(_latency(grades.values()))
    except BaseException:
        for future in pending.values():
            future.cancel()
        raise
    return {key: _Verdict(images.get(key), failures.get(key), grades.get(key, {})) for key in keys}


def _wait_for(
    future: Future[dict[str, Grade]], should_stop: Callable[[], bool]
) -> dict[str, Grade]:
    while not should_stop():
        if wait([future], timeout=0.5).done:
            return future.result()
    raise Interrupted


def _latency(graded: Iterable[Mapping[str, Grade]]) -> str:
    """'verdicts after 0.8 s (median), 2.1 s (longest)', or '' when nothing was graded."""
    seconds = sorted(max((g.seconds for g in grades.values()), default=0.0) for grades in graded)
    if not seconds:
        return ""
    return (
        f"verdicts after {seconds[len(seconds) // 2]:.1f} s (median), {seconds[-1]:.1f} s (longest)"
    )


async def _grade(rewards: Mapping[str, Reward], evidence: Evidence) -> dict[str, Grade]:
    grades = await asyncio.gather(*(reward.grade(evidence) for reward in rewards.values()))
    return dict(zip(rewards, grades, strict=True))


def _episode(
    config: RunConfig,
    arm: _Arm,
    group_id: str,
    noise_seed: int,
    verdict_of: Mapping[PictureKey, _Verdict],
) -> Episode:
    """Fold one completion's pictures into its episode: rewards and parts are their means."""
    verdicts = [verdict_of[key] for key in arm.pictures]

    def episode(status: Status, reward: float | None, failure: str | None, **more: Any) -> Episode:
        image = next((v.image for v in verdicts if v.image is not None), None)
        return Episode(
            group_id, arm.prompt, arm.completion, arm.action, noise_seed, image, status, reward,
            failure=failure, **more,
        )  # fmt: skip

    floor = config.algorithm.policy_failed_reward
    if arm.failure is not None:
        return episode(Status.POLICY_FAILED, floor, arm.failure)
    for verdict in verdicts:
        if verdict.failure is not None and verdict.failure.blame == "policy":
            return episode(Status.POLICY_FAILED, floor, verdict.failure.reason)

    parts: dict[str, list[float]] = {}
    replies: dict[str, tuple[str, ...]] = {}
    causes: list[str] = []
    rewards: list[float] = []
    judge_s = 0.0
    for verdict in verdicts:
        if verdict.failure is not None:
            causes.append(f"renderer: {verdict.failure.reason}")
            continue
        for name, grade in verdict.grades.items():
            replies[name] = replies.get(name, ()) + grade.replies
            judge_s = max(judge_s, grade.seconds)
            for part, value in _named_parts(name, grade).items():
                parts.setdefault(part, []).append(value)
            if grade.value is None:
                causes.append(f"{name}: {grade.failure}")
        reward = compose(_values(verdict.grades), config.final_reward)
        if reward is not None:
            rewards.append(reward)
    more: dict[str, Any] = {
        "parts": {name: fmean(values) for name, values in parts.items()},
        "replies": replies,
        "judge_s": judge_s,
    }
    if not rewards:
        return episode(Status.UNGRADED, None, "; ".join(causes) or "no reward", **more)
    more["image_rewards"] = tuple(rewards)
    return episode(Status.SCORED, fmean(rewards), "; ".join(causes) or None, **more)


def _named_parts(name: str, grade: Grade) -> dict[str, float]:
    parts = {f"{name}/{part}": value for part, value in grade.parts.items()}
    return parts if grade.value is None else {name: grade.value, **parts}


def _values(grades: Mapping[str, Grade]) -> dict[str, float | None]:
    """What the final reward may name: every reward's value, and its parts as `<reward>/<part>`."""
    values: dict[str, float | None] = {name: grade.value for name, grade in grades.items()}
    for name, grade in grades.items():
        values.update({f"{name}/{part}": value for part, value in grade.parts.items()})
    return values


def training_sequences(
    config: RunConfig,
    policy: Policy,
    iteration: int,
    episodes_PG: Sequence[Sequence[Episode]],
    advantages_PG: Sequence[Sequence[float | None]],
) -> list[TrainSequence]:
    """What the learner may learn from: graded episodes, in order, group by group.

    UNGRADED episodes are absent. Forced tokens, those that the policy leaves out, and all tokens of
    a truncated completion under `truncated_completions: 'mask'`, are attended to but carry no loss.
    A group without spread is absent under `zero_spread_groups: 'drop'`. With one update per
    iteration the learner's own forward gives the old log-probs, so that the ratio is exactly 1: the
    rollout's stay behind.
    """
    mask_truncated = config.algorithm.truncated_completions == "mask"
    drop_flat = config.algorithm.zero_spread_groups == "drop"
    reuse_logprobs = config.optimizer.updates_per_iteration > 1
    sequences: list[TrainSequence] = []
    for episodes_G, advantages_G in zip(episodes_PG, advantages_PG, strict=True):
        if drop_flat and not any(advantages_G):
            continue
        for episode, advantage in zip(episodes_G, advantages_G, strict=True):
            if advantage is None:
                continue
            completion = episode.completion
            masked = mask_truncated and completion.finish == "length"
            forced = completion.forced or (False,) * len(completion.token_ids)
            wanted = policy.loss_mask(completion, iteration)
            logprobs = episode.action.logprobs if reuse_logprobs else None
            sequences.append(
                TrainSequence(
                    prompt=episode.prompt,
                    token_ids=completion.token_ids,
                    loss_mask=tuple(
                        w and not f and not masked for w, f in zip(wanted, forced, strict=True)
                    ),
                    advantage=advantage,
                    sampler_logprobs=completion.logprobs,
                    old_logprobs=None if logprobs is None else tuple(logprobs.tolist()),
                )
            )
    return sequences
