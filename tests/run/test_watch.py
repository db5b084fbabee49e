"""Conditions that a run reports once, when they begin."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
from tiny_messages import names
from tiny_run import episode, run_config

from rl.algorithm.metrics import Metrics
from rl.api.types import Episode
from rl.ranks.dist import Dist
from rl.rollout.stream import Rollout
from rl.run.metric_table import check_known
from rl.run.watch import SEVERAL, TREND, Watch

LEARNS = {"optimizer/steps": 1.0, "optimizer/grad_norm": 0.3, "groups/zero_spread": 0.25}
STANDS = {"optimizer/steps": 0.0, "optimizer/skipped_steps": 0.0, "groups/zero_spread": 1.0}


def graded(*values: float, name: str = "judge") -> list[Episode]:
    return [replace(episode(), reward=value, parts={name: value}) for value in values]


def make_watch(dtype: str = "float32", dropout: float = 0.0, **changes: Any) -> Watch:
    return Watch(run_config(**changes), dtype, dropout)


def told(watch: Watch, *iterations: dict[str, float]) -> list[list[str]]:
    """What is said of each iteration of these metrics."""
    return [list(watch.sentences(LEARNS | each, is_last=False)) for each in iterations]


def shown_to(
    watch: Watch, rows: Sequence[Sequence[float]], metrics: dict[str, float], **more: Any
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
    watch = make_watch()
    assert shown_to(watch, [[value] * 4] * (SEVERAL - 1), LEARNS) == [], "may be chance"
    [sentence] = shown_to(watch, [[value] * 4] * 5, LEARNS)
    parts = f"rewards.judge: {value:.4g} ... 12 completions ... reward/range/judge ... judge.model"
    assert names(sentence, parts)
    assert shown_to(watch, [[value, 0.3]], LEARNS) == [], "it has changed"
    assert len(shown_to(watch, [[value] * 4] * SEVERAL, LEARNS)) == 1, "it has begun again"


def test_a_judge_that_tells_anything_apart_is_not_said() -> None:
    """Though all of a group may be equal: the groups differ."""
    watch = make_watch()
    assert shown_to(watch, [[0.2] * 4, [0.8] * 4] * 5, LEARNS) == []
    assert shown_to(watch, [[0.5]] * 7, LEARNS) == [], "seven equal values may be chance"


def test_rewards_that_do_not_count_are_not_said() -> None:
    watch = make_watch(final_reward={"weights": {"other": 1.0, "judge": 0.0}})
    assert shown_to(watch, [[0.5] * 8] * 5, LEARNS) == []
    watch = make_watch(final_reward={"weights": {"judge/edit_success": 1.0}})
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
        metrics = make_watch().add_rewards(Rollout([rows], [bare]), Pair(rank, box, barrier))
        return Metrics.merge([metrics.state()])

    with ThreadPoolExecutor(2) as ranks:
        both = list(ranks.map(found, range(2)))
    assert both == [{"reward/range/judge": 0.5}] * 2
    check_known(both[0], {})


@pytest.mark.parametrize(
    ("metric", "high", "low", "num", "parts"),
    [
        ("groups/zero_spread", 1.0, 0.0, SEVERAL, "100% of the groups ... 3 iterations"),
        ("groups/zero_spread", 0.95, 0.5, TREND, "95% of the groups ... 10 iterations"),
        ("groups/dead", 0.9, 0.0, TREND, "90% of the groups ... 10 iterations ... groups/dead"),
        ("mismatch/k3", 0.01, 1e-9, SEVERAL, "mismatch/k3 0.01 nats ... limit 1e-05 ... engine"),
        ("mismatch/ess", 0.9, 1.0, SEVERAL, "mismatch/ess 0.900 ... limit 0.999"),
    ],
)
def test_a_condition_is_said_when_it_begins_and_again_after_it_was_gone(
    metric: str, high: float, low: float, num: int, parts: str
) -> None:
    watch = make_watch()
    sound = {"mismatch/k3": 1e-10, "mismatch/ess": 1.0}
    bad, good = sound | {metric: high}, sound | {metric: low}
    assert told(watch, *[bad] * (num - 1)) == [[]] * (num - 1), "may pass"
    [[sentence]] = told(watch, bad)
    assert names(sentence, parts)
    assert told(watch, *[bad] * 5, *[good] * TREND) == [[]] * (5 + TREND), "said once"
    assert len(list(chain(*told(watch, *[bad] * num)))) == 1, "it has begun again"


@pytest.mark.parametrize(
    "healthy",
    [
        [{"groups/zero_spread": 0.85}] * 30,
        [{"groups/zero_spread": each} for each in (1, 1, 0.5) * 10],
        [{"groups/dead": 0.25}] * 30,
        [{"mismatch/k3": each, "mismatch/ess": 1.0} for each in (1.0, 1.0, 1e-7) * 10],
    ],
)
def test_healthy_iterations_are_not_said(healthy: list[dict[str, float]]) -> None:
    assert list(chain(*told(make_watch(), *healthy))) == []


@pytest.mark.parametrize(
    ("dtype", "k3", "num"),
    [
        ("bfloat16", [1.5e-5, 5.7e-4, 1.2e-3, 1.5e-3], 1),  # an adapter at twice its scale
        ("bfloat16", [3.4e-3, 1.7e-3, 2.2e-3], 1),  # a temperature of 1.1
        ("bfloat16", [5e-4, 6e-4, 9e-4, 7e-4, 8e-4], 0),  # a large model's rounding
        ("bfloat16", [1.5e-5, 5.5e-5, 5.5e-5, 5.5e-5], 0),
        ("float32", [1e-13, 2e-6, 2e-6, 2e-6], 1),
        ("float32", [1e-6, 5e-6, 5e-6, 5e-6], 0),
    ],
)
def test_a_mismatch_that_grows_is_said_within_three_iterations(
    dtype: str, k3: list[float], num: int
) -> None:
    said = told(make_watch(dtype), *[{"mismatch/k3": each, "mismatch/ess": 1.0} for each in k3])
    assert [len(sentences) for sentences in said] == [0] * (len(k3) - 1) + [num]


@pytest.mark.parametrize(
    "changes",
    [{"max_staleness": 1}, {"sampling": {"top_p": 0.9}}, {"sampling": {"top_k": 20}}, {}],
)
def test_an_engine_that_is_meant_to_differ_is_not_said(changes: dict[str, Any]) -> None:
    """One iteration behind, a truncated distribution, dropout in the trainer."""
    watch = make_watch(dropout=0.0 if changes else 0.1, **changes)
    assert list(chain(*told(watch, *[{"mismatch/k3": 1.0, "mismatch/ess": 0.5}] * 5))) == []


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
    said = told(make_watch(), *[{"groups/zero_spread": 1.0, **seen}] * SEVERAL)
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
    watch = make_watch()
    said = [
        [one for one in watch.sentences(stands, is_last=False) if "step" in one]
        for _ in range(SEVERAL + 2)
    ]
    assert [len(sentences) for sentences in said] == [0, 0, 1, 0, 0]
    assert names(said[2], f"3 iterations (optimizer/steps) ... {reason}")
    [last] = watch.sentences(stands, is_last=True)
    assert names(last, f"the run ends ... 6 iterations ... {reason}")


def test_a_run_that_took_a_step_ends_without_a_line() -> None:
    watch = make_watch()
    for number, kind in enumerate([STANDS, STANDS, LEARNS, STANDS, STANDS]):
        assert list(watch.sentences(kind, is_last=number == 4)) == []


def test_what_was_measured_before_training_is_no_iteration() -> None:
    assert list(make_watch().sentences({"eval/reward": 0.1}, is_last=False)) == []
