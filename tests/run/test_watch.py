"""Conditions that a run reports once, when they begin."""

from __future__ import annotations

from collections.abc import Sequence
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
from rl.run.metric_table import doc_of
from rl.run.watch import SEVERAL, TREND, Watch

LEARNS = {"optimizer/steps": 1.0, "optimizer/grad_norm": 0.3, "groups/zero_spread": 0.25}
STANDS = {"optimizer/steps": 0.0}


def graded(*values: float) -> list[Episode]:
    parts = ("judge", "judge/edit_success")
    return [replace(episode(), reward=v, parts=dict.fromkeys(parts, v)) for v in values]


def make_watch(dtype: str = "float32", dropout: float = 0.0, **changes: Any) -> Watch:
    return Watch(run_config(**changes), dtype, dropout)


def told(watch: Watch, *iterations: dict[str, float]) -> list[list[str]]:
    """What is said of each iteration of these metrics."""
    return [list(watch.sentences(LEARNS | each)) for each in iterations]


def shown_to(watch: Watch, rows: Sequence[Sequence[float]]) -> list[str]:
    """What is said of iterations of those rewards, one row each."""
    said = []
    for row in rows:
        watch.add_rewards(Rollout([graded(*row)], [None]), Dist())
        said += watch.sentences(LEARNS)
    return said


def mismatches(*k3: float, ess: float = 1.0) -> list[dict[str, float]]:
    return [{"mismatch/k3": each, "mismatch/ess": ess} for each in k3]


@pytest.mark.parametrize("value", [0.0, 0.65, 1.0])
def test_a_judge_that_always_answers_the_same_is_said_once(value: float) -> None:
    watch = make_watch()
    assert shown_to(watch, [[value] * 4] * (SEVERAL - 1)) == [], "may be chance"
    [sentence] = shown_to(watch, [[value] * 4] * 5)
    parts = f"rewards.judge: {value:.4g} ... 12 completions ... reward/range/judge ... judge.model"
    assert names(sentence, parts)
    assert shown_to(watch, [[value, 0.3]]) == [], "it has changed"
    assert len(shown_to(watch, [[value] * 4] * SEVERAL)) == 1, "it has begun again"


@pytest.mark.parametrize(
    ("weights", "rows", "said"),
    [
        ({}, [[0.2] * 4, [0.8] * 4] * 5, []),  # each group is equal, and they differ
        ({}, [[0.5]] * 7, []),  # seven equal values may be chance
        ({}, [[], [0.5] * 8, [], [0.5] * 8, []], []),  # nothing graded is no value
        ({}, [[], [0.5] * 8, [], [0.5] * 8, [], [0.5] * 8], ["judge"]),  # the third that graded
        ({"other": 1.0, "judge": 0.0}, [[0.5] * 8] * 5, []),  # it does not count
        ({"judge/edit_success": 1.0}, [[0.5] * 8] * 3, ["judge/edit_success"]),
    ],
)
def test_only_a_reward_that_counts_and_tells_nothing_apart_is_said(
    weights: dict[str, float], rows: list[list[float]], said: list[str]
) -> None:
    sentences = shown_to(make_watch(final_reward={"weights": weights}), rows)
    assert [one.partition(":")[0] for one in sentences] == [f"rewards.{name}" for name in said]


def test_the_range_is_over_all_ranks_and_the_bare_arm() -> None:
    brought: list[Any] = []

    class SecondOfTwo(Dist):
        def gather(self, value: Any) -> list[Any]:
            brought.append(value)
            return brought

    for rewards, bare in (((0.5, 0.5), graded(0.25)[0]), ((0.5, 0.75), None)):
        rollout = Rollout([graded(*rewards)], [bare])
        metrics = make_watch().add_rewards(rollout, SecondOfTwo(1, 2))
    found = Metrics.merge([metrics.state()])
    assert found == {"reward/range/judge": 0.5}
    assert all(map(doc_of, found))


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
    [sound] = mismatches(1e-10)
    bad, good = sound | {metric: high}, sound | {metric: low}
    assert told(watch, *[bad] * (num - 1)) == [[]] * (num - 1), "may pass"
    [[sentence]] = told(watch, bad)
    assert names(sentence, parts)
    assert told(watch, *[bad] * 5, *[good] * TREND) == [[]] * (5 + TREND), "said once"
    assert len(list(chain(*told(watch, *[bad] * num)))) == 1, "it has begun again"


@pytest.mark.parametrize(
    ("watch", "iterations"),
    [
        (make_watch(), [{"groups/zero_spread": 0.85}] * 30),
        (make_watch(), [{"groups/zero_spread": each} for each in (1, 1, 0.5) * 10]),
        (make_watch(), [{"groups/dead": 0.25}] * 30),
        (make_watch(), mismatches(*(1.0, 1.0, 1e-7) * 10)),
        # Sound bfloat16 runs of the quickstart reach 5.5e-5, TF32 in a GPU's attention about 1e-6.
        (make_watch("bfloat16"), mismatches(*[6e-5] * 5, ess=0.9999)),
        (make_watch(), mismatches(*[1e-6] * 5, ess=0.9999)),
        (make_watch("bfloat16"), mismatches(5e-4, 6e-4, 9e-4, 7e-4, 8e-4)),  # a large model's
        (make_watch("bfloat16"), mismatches(1.5e-5, 5.5e-5, 5.5e-5, 5.5e-5)),
        (make_watch(), mismatches(1e-6, 5e-6, 5e-6, 5e-6)),
        # The engine is meant to differ.
        (make_watch(max_staleness=1), mismatches(*[1.0] * 5, ess=0.5)),
        (make_watch(sampling={"top_p": 0.9}), mismatches(*[1.0] * 5, ess=0.5)),
        (make_watch(sampling={"top_k": 20}), mismatches(*[1.0] * 5, ess=0.5)),
        (make_watch(dropout=0.1), mismatches(*[1.0] * 5, ess=0.5)),
    ],
)
def test_healthy_iterations_are_not_said(watch: Watch, iterations: list[dict[str, float]]) -> None:
    assert list(chain(*told(watch, *iterations))) == []


@pytest.mark.parametrize(
    ("dtype", "k3"),
    [
        ("bfloat16", [1.5e-5, 5.7e-4, 1.2e-3, 1.5e-3]),  # an adapter at twice its scale
        ("bfloat16", [3.4e-3, 1.7e-3, 2.2e-3]),  # a temperature of 1.1
        ("float32", [1e-13, 2e-6, 2e-6, 2e-6]),
    ],
)
def test_a_mismatch_that_grows_is_said_within_three_iterations(dtype: str, k3: list[float]) -> None:
    *before, [sentence] = told(make_watch(dtype), *mismatches(*k3))
    assert before == [[]] * (len(k3) - 1)
    assert names(sentence, f"{dtype} ... mismatch/k3")


FLAT = {"groups/zero_spread": 1.0}


@pytest.mark.parametrize(
    ("seen", "reason"),
    [
        (FLAT | {"status/policy_failed": 1.0}, "no completion"),
        (FLAT | {"status/ungraded": 1.0}, "no picture"),
        (FLAT | {"groups/distinct_completions": 0.125}, "sampling.temperature"),
        (FLAT | {"groups/distinct_completions": 1.0, "reward/mean": 1.0}, "the full reward"),
        (FLAT | {"groups/distinct_completions": 1.0, "reward/mean": 0.4}, "distinguish"),
        (STANDS | FLAT, "all rewards of each group were equal, and nothing else"),
        (STANDS | {"optimizer/skipped_steps": 1.0}, "not finite"),
        (STANDS | {"status/ungraded": 1.0}, "nothing was graded"),
        ({"optimizer/steps": 1.0, "optimizer/grad_norm": 0.0}, "gradient was exactly 0"),
        (STANDS, "no token was in the loss"),
    ],
)
def test_iterations_without_spread_or_step_are_said_once_with_the_reason(
    seen: dict[str, float], reason: str
) -> None:
    watch = make_watch()
    said = told(watch, *[seen] * SEVERAL)
    assert said[:-1] == [[]] * (SEVERAL - 1)
    assert reason in str(said[-1])
    assert told(watch, seen) == [[]]


def test_what_was_measured_before_training_is_no_iteration() -> None:
    watch = make_watch()
    assert list(chain(*(watch.sentences(FLAT) for _ in range(TREND)))) == []
