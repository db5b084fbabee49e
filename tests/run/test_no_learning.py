"""A run that cannot learn says so: constant rewards, no spread, no steps."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from tiny_messages import names
from tiny_run import episode, run_config

from rl.algorithm.metrics import Metrics
from rl.api.types import Episode
from rl.ranks.dist import Dist
from rl.rollout.stream import Rollout
from rl.run.metric_table import check_known
from rl.run.no_learning import SEVERAL, TREND, ConstantRewards, NoLearning, NoSpread, NoSteps, Range

LEARNS = {"optimizer/steps": 1.0, "optimizer/grad_norm": 0.3, "groups/zero_spread": 0.25}
STANDS = {"optimizer/steps": 0.0, "optimizer/skipped_steps": 0.0, "groups/zero_spread": 1.0}


def graded(*values: float, name: str = "judge") -> list[Episode]:
    return [replace(episode(), reward=value, parts={name: value}) for value in values]


def shown_to(
    watch: NoLearning, rows: Sequence[Sequence[float]], metrics: dict[str, float], **more: Any
) -> list[str]:
    """What is said of iterations of those rewards, one row each."""
    said = []
    for row in rows:
        rollout = Rollout([graded(*row)], [None])
        watch.add_rewards(rollout, Dist())
        said += watch.sentences(metrics, is_last=False, **more)
    return said


@pytest.mark.parametrize("value", [0.0, 0.65, 1.0])
def test_a_judge_that_always_answers_the_same_is_said_once(value: float) -> None:
    watch = NoLearning(run_config())
    assert shown_to(watch, [[value] * 4] * (SEVERAL - 1), LEARNS) == [], "may be chance"
    [sentence] = shown_to(watch, [[value] * 4] * 5, LEARNS)
    parts = f"rewards.judge: {value:.4g} ... 12 completions ... reward/range/judge ... judge.model"
    assert names(sentence, parts)
    assert shown_to(watch, [[value, 0.3]], LEARNS) == [], "it has changed"
    assert len(shown_to(watch, [[value] * 4] * SEVERAL, LEARNS)) == 1, "it has begun again"


def test_a_judge_that_tells_anything_apart_is_not_said() -> None:
    """Though all of a group may be equal: the groups differ."""
    watch = NoLearning(run_config())
    assert shown_to(watch, [[0.2] * 4, [0.8] * 4] * 5, LEARNS) == []
    assert shown_to(watch, [[0.5]] * 7, LEARNS) == [], "seven equal values may be chance"


def test_rewards_that_do_not_count_are_not_said() -> None:
    config = run_config(final_reward={"weights": {"other": 1.0, "judge": 0.0}})
    assert shown_to(NoLearning(config), [[0.5] * 8] * 5, LEARNS) == []
    part = run_config(final_reward={"weights": {"judge/edit_success": 1.0}})
    watch = NoLearning(part)
    rollout = Rollout([graded(*[0.5] * 8, name="judge/edit_success")], [None])
    for _ in range(SEVERAL):
        watch.add_rewards(rollout, Dist())
        said = list(watch.sentences(LEARNS, is_last=False))
    assert said[0].startswith("rewards.judge/edit_success: 0.5")


class Pair(Dist):
    """Two ranks in threads."""

    def __init__(self, rank: int, box: list[Any], barrier: threading.Barrier) -> None:
        super().__init__(rank, 2)
        object.__setattr__(self, "box", box)
        object.__setattr__(self, "wall", barrier)

    def gather(self, value: Any) -> list[Any]:
        self.box[self.rank] = value
        self.wall.wait()
        return list(self.box)


def test_the_range_is_over_all_ranks_and_the_bare_arm() -> None:
    box: list[Any] = [None, None]
    barrier = threading.Barrier(2)

    def found(rank: int) -> dict[str, float]:
        rows = [graded(0.5, 0.5), graded(0.5, 0.75)][rank]
        bare = [graded(0.25)[0], None][rank]
        metrics = NoLearning(run_config()).add_rewards(
            Rollout([rows], [bare]), Pair(rank, box, barrier)
        )
        return Metrics.merge([metrics.state()])

    with ThreadPoolExecutor(2) as ranks:
        both = list(ranks.map(found, range(2)))
    assert both == [{"reward/range/judge": 0.5}] * 2
    check_known(both[0], {})


def test_a_reward_that_grades_nothing_says_nothing() -> None:
    constant = ConstantRewards()
    full = {"judge": Range(0.5, 0.5, 8)}
    assert [list(constant.add(found)) for found in ({}, full, {}, full, {})] == [[]] * 5
    assert len(list(constant.add(full))) == 1, "the third that graded"


def test_no_spread_is_said_when_it_begins() -> None:
    spread = NoSpread()
    of_none = {"groups/zero_spread": 1.0}
    assert [spread.add(of_none) for _ in range(SEVERAL - 1)] == [None] * (SEVERAL - 1)
    first = spread.add(of_none)
    assert names(first, "100% of the groups ... 3 iterations")
    assert spread.add(of_none) is None, "said once"
    assert spread.add({"groups/zero_spread": 0.5}) is None
    again = [spread.add(of_none) for _ in range(SEVERAL)]
    assert again[-1] is not None, "it has begun again"


def test_hardly_any_spread_is_said_of_a_trend() -> None:
    spread = NoSpread()
    said = [spread.add({"groups/zero_spread": 0.95}) for _ in range(TREND + 5)]
    assert [sentence is not None for sentence in said] == [False] * 9 + [True] + [False] * 5
    assert names(said[TREND - 1], "95% of the groups ... 10 iterations")
    healthy = NoSpread()
    assert not any(healthy.add({"groups/zero_spread": 0.85}) for _ in range(30))
    seldom = NoSpread()
    assert not any(seldom.add({"groups/zero_spread": each}) for each in (1, 1, 0.5) * 10)


@pytest.mark.parametrize(
    ("seen", "reason"),
    [
        ({"status/policy_failed": 1.0}, "no completion"),
        ({"status/ungraded": 1.0}, "no picture"),
        ({"groups/distinct_completions": 0.125}, "sampling.temperature"),
        ({"groups/distinct_completions": 1.0, "reward/mean": 1.0}, "full marks"),
        ({"groups/distinct_completions": 1.0, "reward/mean": 0.4}, "completions"),
    ],
)
def test_the_likeliest_reason_is_given(seen: dict[str, float], reason: str) -> None:
    spread = NoSpread()
    said = [spread.add({"groups/zero_spread": 1.0, **seen}) for _ in range(SEVERAL)]
    assert reason in str(said[-1])


@pytest.mark.parametrize(
    ("stands", "reason"),
    [
        (STANDS, "equal"),
        (STANDS | {"optimizer/skipped_steps": 1.0}, "not finite"),
        (STANDS | {"status/ungraded": 1.0}, "nothing was graded"),
        ({"optimizer/steps": 1.0, "optimizer/grad_norm": 0.0}, "gradient"),
        ({"optimizer/steps": 0.0}, "no token carried a loss"),
    ],
)
def test_iterations_without_a_step_are_said_in_a_row_and_at_the_end(
    stands: dict[str, float], reason: str
) -> None:
    steps = NoSteps()
    said = [steps.add(stands, is_last=False) for _ in range(SEVERAL + 2)]
    assert [sentence is not None for sentence in said] == [False, False, True, False, False]
    assert names(said[2], f"3 iterations (optimizer/steps) ... {reason}")
    assert names(steps.add(stands, is_last=True), f"the run ends ... 6 iterations ... {reason}")


def test_a_run_of_one_iteration_without_a_step_ends_with_a_line() -> None:
    assert NoSteps().add(STANDS, is_last=True) is not None


def test_a_run_that_took_a_step_ends_without_a_line() -> None:
    steps = NoSteps()
    kinds = [STANDS, STANDS, LEARNS, STANDS, STANDS]
    said = [steps.add(kind, is_last=number == 4) for number, kind in enumerate(kinds)]
    assert said == [None] * 5


def test_what_was_measured_before_training_is_no_iteration() -> None:
    watch = NoLearning(run_config())
    assert list(watch.sentences({"eval/reward": 0.1}, is_last=False)) == []
