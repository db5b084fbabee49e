"""Builds one completion's episode from the verdicts on its pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, variance
from typing import Any

from PIL.Image import Image

from rl.algorithm.compose import compose
from rl.api.reward import Reward
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
    is_unreadable,
)
from rl.config.schema import FinalReward, RunConfig
from rl.printing import excerpt

Grades = Mapping[str, RewardOutput]
"""Reward name -> its output."""


@dataclass(frozen=True)
class Verdict:
    """One picture with its grades, or the reason why there is no picture."""

    image: Image | None
    failure: RenderFailure | None = None
    grades: Grades = field(default_factory=dict)


@dataclass(eq=False)
class Picture:
    """One picture to render. Completions of a group share it if it is drawn from the same ids."""

    p: int
    """Index of its prompt."""
    number: int
    """Index (from 0) among its completion's `images_per_completion` pictures. Pictures of a group
    with the same number share their noise."""
    readings: dict[tuple[int, ...], Reading] = field(default_factory=dict)
    """Token ids of each completion that the picture is drawn for -> its reading."""
    drawn_of: Sample | None = None
    """The sample of its render job."""
    outcome: Image | RenderFailure | None = None
    has_outcome: bool = False


@dataclass(eq=False)
class Reading:
    """A picture together with the text and thought of a completion that it is drawn for.
    Completions with equal token ids share one reading."""

    picture: Picture
    base_input: RewardInput
    """The rewards' input without the picture."""
    verdict: Verdict | None = None
    """Set when every reward has graded it."""

    @property
    def can_be_graded(self) -> bool:
        return self.picture.has_outcome and not isinstance(self.picture.outcome, RenderFailure)

    @property
    def reward_input(self) -> RewardInput:
        assert not isinstance(self.picture.outcome, RenderFailure)
        return replace(self.base_input, image=self.picture.outcome)

    def grading_unit(self, reward: Reward) -> Picture | Reading:
        """What the reward grades once: the reading if the reward reads thoughts, else the picture,
        which several readings may share."""
        return self if reward.reads_thoughts else self.picture


@dataclass(frozen=True)
class Arm:
    """One completion before its episode is built."""

    prompt: Prompt
    completion: Completion
    action: Action
    failure: str | None
    """Why the completion is not rendered; None if it is rendered."""
    readings: Sequence[Reading]
    """The readings of its pictures; empty if it is not rendered."""


def why_not_rendered(config: RunConfig, completion: Completion, action: Action) -> str | None:
    """A message that says why the completion is not rendered; None if it is rendered."""
    if action.failure is not None:
        return action.failure
    if completion.finish == "length" and config.algorithm.truncated_completions == "floor":
        return "truncated: hit sampling.max_completion_tokens"
    return None


def episode_of(config: RunConfig, arm: Arm, group_id: str, noise_seed: int) -> Episode:
    """Build a completion's episode when all its verdicts are known. Its reward and parts are means
    over its pictures. Raises RuntimeError if another prompt's sample was drawn or graded."""
    for reading in arm.readings:
        require_own_sample(arm.prompt, reading.picture.drawn_of, "drawn")
        require_own_sample(arm.prompt, reading.base_input.sample, "graded")
    verdicts = [reading.verdict for reading in arm.readings if reading.verdict is not None]
    drawn = next((verdict for verdict in verdicts if verdict.image is not None), None)

    def episode(status: Status, reward: float | None, failure: str | None, **more: Any) -> Episode:
        return Episode(
            group_id, arm.prompt, arm.completion, arm.action, noise_seed,
            None if drawn is None else drawn.image, status, reward,
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
    failures: list[str | None] = []
    rewards: list[float] = []
    variances: list[float | None] = []
    judge_s = 0.0
    for verdict in verdicts:
        if verdict.failure is not None:
            causes.append(f"renderer: {verdict.failure.reason}")
            failures.append(None)
            continue
        for name, grade in verdict.grades.items():
            replies[name] = replies.get(name, ()) + grade.replies
            judge_s = max(judge_s, grade.seconds)
            if grade.failure is not None:
                failures.append(grade.failure)
                causes.append(f"{name}: {grade.failure}" + f"\n{grade.traceback}".rstrip())
        values = values_of(verdict.grades)
        for part, value in values.items():
            if value is not None:
                parts.setdefault(part, []).append(value)
        # Outside of training there are no rewards, so there are no grades.
        reward = compose(values, config.final_reward) if verdict.grades else None
        if reward is not None:
            rewards.append(reward)
            variances.append(judge_variance(verdict.grades, config.final_reward))
    fields: dict[str, Any] = {
        "parts": {name: fmean(values) for name, values in parts.items()},
        "replies": replies,
        "regions": {
            name: grade.regions
            for name, grade in (drawn.grades if drawn else {}).items()
            if grade.regions
        },
        "judge_s": judge_s,
    }
    is_counted = not rewards or config.judge.unreadable == "lowest"
    if failures and is_counted:
        fields["unreadable"] = all(map(is_unreadable, failures))
    if not rewards:
        return episode(Status.UNGRADED, None, "; ".join(causes) or "no reward", **fields)
    fields |= {"image_rewards": tuple(rewards), "judge_variances": tuple(variances)}
    return episode(Status.SCORED, fmean(rewards), "; ".join(causes) or None, **fields)


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


def judge_variance(grades: Grades, final: FinalReward) -> float | None:
    """Variance of a picture's final reward between repeated judgements: the sum over the judge's
    rewards of (weight / sum of weights)^2 x variance of its readings / their number.

    None where it is unknown: no judge, a single reading, or a final reward that is not a weighted
    sum of whole rewards.
    """
    weights = final.weights or dict.fromkeys(grades, 1.0)
    counted = {name: weight for name, weight in weights.items() if weight}
    judged = [name for name in counted if name in grades and grades[name].replies]
    is_sum = final.op == "weighted_sum" or len(counted) == 1
    has_readings = all(len(grades[name].readings) > 1 for name in judged)
    if not (judged and is_sum and has_readings and counted.keys() <= grades.keys()):
        return None
    shares = {name: counted[name] / sum(counted.values()) for name in judged}
    return sum(
        share**2 * variance(grades[name].readings) / len(grades[name].readings)
        for name, share in shares.items()
    )


def values_of(grades: Mapping[str, RewardOutput]) -> dict[str, float | None]:
    """Values that `final_reward` may use: each reward's, and its parts' as `<reward>/<part>`."""
    values: dict[str, float | None] = {}
    for name, grade in grades.items():
        values[name] = grade.value
        values |= {f"{name}/{part}": value for part, value in grade.parts.items()}
    return values
