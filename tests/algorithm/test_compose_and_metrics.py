"""Reward composition, metrics merged over ranks, and the learning-rate schedule."""

import math
from collections.abc import Sequence
from typing import Any

import pytest

from rl.algorithm.metrics import Metrics, compose
from rl.config.schema import FinalReward
from rl.learner.learner import learning_rate

# --- compose ----------------------------------------------------------------------------------


A0, B1 = {"a": 0.0, "b": 1.0}, {"a": None, "b": 1.0}
GEOMETRIC = {"op": "geometric_mean"}


@pytest.mark.parametrize(
    ("values", "section", "expected"),
    [
        ({"a": 0.5, "b": 0.8}, {"weights": {"a": 0.6, "b": 0.4}}, 0.62),
        ({"a": 0.5, "b": 0.8}, GEOMETRIC | {"weights": {"a": 0.6, "b": 0.4}}, 0.5**0.6 * 0.8**0.4),
        # Weights are relative.
        ({"a": 0.2, "b": 1.0}, {"weights": {"a": 3, "b": 1}}, 0.4),
        ({"a": 0.2, "b": 1.0}, GEOMETRIC | {"weights": {"a": 2, "b": 2}}, math.sqrt(0.2)),
        # Without weights all rewards count equally, and parts do not.
        ({"a": 0.2, "b": 0.6, "a/detail": 9.0}, {}, 0.4),
        # A zero makes only the geometric mean zero.
        (A0, GEOMETRIC, 0.0),
        (A0, {}, 0.5),
        # An ungraded reward that counts makes the final reward None.
        (B1, {}, None),
        (B1, {"weights": {"b": 1}}, 1.0),
        (B1, {"weights": {"a": 0, "b": 1}}, 1.0),
        ({"a": None}, {"weights": {"a/part": 1}}, None),
    ],
)
def test_the_final_reward_by_hand(
    values: dict[str, float | None], section: dict[str, Any], expected: float | None
) -> None:
    assert compose(values, FinalReward(**section)) == (
        None if expected is None else pytest.approx(expected)
    )


# --- metrics ----------------------------------------------------------------------------------


def test_metrics_of_two_ranks_keep_their_denominators() -> None:
    first, second = Metrics(), Metrics()
    first.add("mean", 1.0)
    for metrics, value, weight in ((first, 2.0, 3.0), (second, 10.0, 6.0)):
        metrics.add("mean", value, weight=weight)
        metrics.maximum("max", 6.0 - value)
        metrics.total("sum", value)
    second.add("only here", 7.0)
    merged = Metrics.merge([first.state(), second.state()])
    assert merged == {
        "mean": pytest.approx((1 + 6 + 60) / 10),
        "max": 4.0,
        "sum": 12.0,
        "only here": 7.0,
    }


def test_weight_zero_adds_nothing_even_for_nan() -> None:
    metrics = Metrics()
    metrics.add("mean", float("nan"), weight=0.0)
    assert Metrics.merge([metrics.state()]) == {}


def test_update_gives_the_same_as_adding_everything_to_one_object() -> None:
    one, other, whole = Metrics(), Metrics(), Metrics()
    for metrics, value in ((one, 1.0), (other, 5.0), (other, 6.0)):
        for target in (metrics, whole):
            target.add("mean", value, weight=value)
            target.maximum("max", value)
            target.total("sum", value)
    one.update(other)
    assert Metrics.merge([one.state()]) == Metrics.merge([whole.state()])


def test_a_metric_keeps_its_kind() -> None:
    metrics = Metrics()
    metrics.add("x", 1.0)
    with pytest.raises(AssertionError, match="'x' is a mean"):
        metrics.total("x", 1.0)


@pytest.mark.parametrize("values", [(1.0, float("nan")), (float("nan"), 1.0)])
def test_a_maximum_with_a_nan_is_nan(values: tuple[float, float]) -> None:
    metrics = Metrics()
    for value in values:
        metrics.maximum("max", value)
    assert math.isnan(Metrics.merge([metrics.state()])["max"])


# --- learning rate ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("iterations", "schedule", "expected"),
    [
        (range(7), (7, 4.0, 2, 0.25), [2.0, 4.0, 4.0, 3.25, 2.5, 1.75, 1.0]),
        (range(3), (3, 1e-5, 0, 1.0), [1e-5] * 3),  # constant by default
        ([0], (1, 1e-5, 0, 0.1), [1e-5]),
        ([9], (5, 1.0, 0, 0.1), [0.1]),
    ],
)
def test_warm_up_then_linear_decay_by_hand(
    iterations: Sequence[int], schedule: tuple[int, float, int, float], expected: list[float]
) -> None:
    assert [learning_rate(i, *schedule) for i in iterations] == pytest.approx(expected)
