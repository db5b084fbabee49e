"""Has a second judge grade the held-out pictures, and compares its rewards with the judge's.

Axes: `_P` held-out samples of this rank, `_S` held-out samples of all ranks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rl.algorithm.compose import compose
from rl.algorithm.metrics import Metrics
from rl.api.reward import Reward
from rl.api.types import Episode, RewardInput, RewardOutput
from rl.config.schema import RunConfig
from rl.console.console import warn
from rl.files.atomic import read_rows
from rl.judge.background import BackgroundLoop
from rl.judge.client import JudgeClient, JudgeError
from rl.ranks import signals
from rl.rollout.consensus import raise_if_interrupted
from rl.rollout.episodes import values_of
from rl.rollout.grading import scores
from rl.rollout.stream import LISTEN_EVERY_S
from rl.run.paired import Paired, paired
from rl.text.untrusted import excerpt

if TYPE_CHECKING:
    from rl.ranks.dist import Dist

Rewards = tuple[float, float]
"""One picture's rewards by the judge of training and by the second judge, 0..1 each."""
Graded = float | str | None
"""A final reward, or why there is none; None for an episode without rewards of pictures."""
LEAST_GAP = 0.05
"""Smallest gap (0..1) worth an alarm. If the second judge reaches its highest marks before the
judge does, even a sound policy makes a small gap."""
MAX_CAUSE_CHARS = 300
FEWEST = 8
"""Fewer samples cannot relate one judge's rewards to the other's."""


def slope_of(pairs_S: Sequence[Rewards]) -> tuple[float, float, float | None]:
    """(least-squares slope of the second judge's rewards on the judge's, its standard error, their
    correlation). A negative slope counts as 0; (0, 0, None) for fewer than `FEWEST` samples, or if
    either judge's rewards are all equal."""
    if len(pairs_S) < FEWEST:
        return 0.0, 0.0, None
    x, y = (values - values.mean() for values in np.array(pairs_S).T)
    if min(x @ x, y @ y) < 1e-12:
        return 0.0, 0.0, None
    slope, correlation = float(x @ y / (x @ x)), float(x @ y / np.sqrt((x @ x) * (y @ y)))
    error = float(np.sqrt(((y - slope * x) ** 2).sum() / (len(x) - 2) / (x @ x)))
    return (slope, error, correlation) if slope > 0 else (0.0, 0.0, correlation)


def gap_of(
    first: Mapping[str, Rewards], now: Mapping[str, Rewards], hashes: Mapping[str, Sequence[str]]
) -> tuple[Paired, float] | None:
    """(mean over samples of slope x (judge's gain) - (second judge's gain), mean of the judge's
    gain), over the samples that both evaluations have; None if there are none.

    `slope_of` the first evaluation translates between the judges' scales, and its error is added.
    A slope is too small by the judge's unreliability, so noise of either judge makes no gap.
    """
    slope, slope_error, _ = slope_of(list(first.values()))
    ids = [key for key in now if key in first]
    gains = [(now[key][0] - first[key][0], now[key][1] - first[key][1]) for key in ids]
    behind = paired([slope * one - two for one, two in gains], [hashes[key] for key in ids])
    if behind is None:
        return None
    gain = float(np.mean([one for one, _ in gains]))
    if behind.error is not None:
        error = (behind.error**2 + (slope_error * gain) ** 2) ** 0.5
        behind = replace(behind, error=error)
    return behind, gain


@dataclass(eq=False)
class SecondJudge:
    """`evaluation.judge`: it fails without consequences for training, and is asked again at the
    next held-out evaluation."""

    config: RunConfig
    client: JudgeClient
    rewards: Mapping[str, Reward]
    """The run's rewards that ask a judge, asking this one."""
    loop: BackgroundLoop
    dist: Dist
    _first: Mapping[str, Rewards] | None = None
    """Sample id -> rewards in the first evaluation that it graded."""

    @property
    def model(self) -> str:
        return self.client.config.model

    def ask(self, iteration: int, episodes_P: Sequence[Episode]) -> Future[list[Graded]]:
        """Begin to grade each episode's (first) picture; _P."""
        file = f"second_{iteration:06d}.rank{self.dist.rank}.jsonl"
        self.client.open_journal(self.config.run_dir / "judge" / file)

        async def grade_all() -> list[Graded]:
            return await asyncio.gather(*map(self._grade, episodes_P))

        return self.loop.submit(grade_all())

    async def _grade(self, episode: Episode) -> Graded:
        if not episode.image_rewards:
            return None
        action, sample = episode.action, episode.prompt.sample
        graded = [RewardInput(sample, action.text, episode.image, action.thought)]
        grades: dict[str, RewardOutput] = {}
        try:
            unreadable = self.client.config.unreadable
            calls = (
                scores(name, reward, graded, unreadable) for name, reward in self.rewards.items()
            )
            for name, [output] in zip(self.rewards, await asyncio.gather(*calls), strict=True):
                grades[name] = output
        except JudgeError as error:
            return excerpt(str(error), MAX_CAUSE_CHARS)
        others = {
            part: value
            for part, value in episode.parts.items()
            if part.partition("/")[0] not in self.rewards
        }
        reward = compose({**others, **values_of(grades)}, self.config.final_reward)
        if reward is not None:
            return reward
        failed = next(f"{name}: {one.failure}" for name, one in grades.items() if one.failure)
        return excerpt(failed, MAX_CAUSE_CHARS)

    def grades(self, call: Future[list[Graded]]) -> list[float | None]:
        """_P, the final reward by this judge; None if it did not grade the picture. Raises
        `Interrupted` on every rank once any was asked to stop. Collective."""
        while not wait([call], timeout=LISTEN_EVERY_S).done and not signals.stop_received():
            pass
        graded_P = call.result() if call.done() else []
        call.cancel()
        raise_if_interrupted(self.dist)
        self.client.take_stats()  # not reported
        causes = [cause for cause in graded_P if isinstance(cause, str)]
        gathered = [cause for of_rank in self.dist.gather(causes[:1]) for cause in of_rank]
        if gathered and self.dist.is_main:
            warn(
                f"evaluation.judge: the second judge {self.model!r} did not grade all held-out "
                f"pictures; training goes on, and it is asked again at the next held-out "
                f"evaluation (eval/second_judge/ungraded). First cause: {gathered[0]}"
            )
        return [None if isinstance(each, str) else each for each in graded_P]

    def add_metrics(
        self,
        metrics: Metrics,
        iteration: int,
        episodes_P: Sequence[Episode],
        rewards_P: Sequence[float | None],
        hashes_P: Sequence[Sequence[str]],
    ) -> None:
        """Collective: adds `eval/second_judge/*`, `eval/judge_gap*`; warns of gaps beyond noise."""
        rows: list[tuple[str, Rewards, Sequence[str]]] = []
        for episode, reward, hashes in zip(episodes_P, rewards_P, hashes_P, strict=True):
            if not episode.image_rewards:
                continue
            metrics.add("eval/second_judge/ungraded", float(reward is None))
            if reward is not None:
                metrics.add("eval/second_judge/reward", reward)
                assert episode.reward is not None, "it has rewards of pictures"
                rows.append((episode.prompt.sample.id, (episode.reward, reward), hashes))
        gathered = [row for of_rank in self.dist.gather(rows) for row in of_rank]
        now = {key: rewards for key, rewards, _ in gathered}
        correlation = slope_of(list(now.values()))[2]
        if correlation is not None:
            metrics.maximum("eval/second_judge/correlation", correlation)
        if self._first is None:
            self._first = self.dist.broadcast(self._recorded(iteration)) or now or None
        if not self._first:
            return
        result = gap_of(self._first, now, {key: hashes for key, _, hashes in gathered})
        if result is None:
            return
        gap, gain = result
        is_alarming = gap.is_alarming and gap.mean > LEAST_GAP and gain >= 0
        metrics.maximum("eval/judge_gap", gap.mean)
        if gap.error is not None:
            metrics.maximum("eval/judge_gap_error", gap.error)
        metrics.maximum("eval/judge_gap_alarm", float(is_alarming))
        if is_alarming and self.dist.is_main:
            warn(
                f"evaluation after {iteration} iterations: the judge's rewards rose by "
                f"{gain:+.3f}, and those of the second judge {self.model!r} stay {gap.mean:.3f} +- "
                f"{gap.error:.3f} behind what that predicts ({gap.num} samples): the policy may "
                "exploit the judge. Compare both rewards on the page's held-out samples"
            )

    def _recorded(self, iteration: int) -> Mapping[str, Rewards]:
        """Rewards of the first evaluation before `iteration` that this judge has graded, from the
        run's records; {} if there is none."""
        if not self.dist.is_main:
            return {}
        for path in sorted(self.config.run_dir.glob("evaluation/it_*/records.jsonl")):
            if path.parent.name >= f"it_{iteration:06d}":
                break
            if found := _rewards_in(path, self.model):
                return found
        return {}


def _rewards_in(path: Path, model: str) -> dict[str, Rewards]:
    rows = ((row, row.get("second_judge") or {}) for row in read_rows(path)[0])
    return {
        row["id"]: (row["reward"], verdict["reward"])
        for row, verdict in rows
        if verdict.get("model") == model
    }
