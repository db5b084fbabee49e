"""Reward composition, metrics merged over ranks, and the learning-rate schedule."""

import math

import pytest

from rl.algorithm.metrics import Metrics, compose
from rl.config.schema import FinalReward
from rl.learner.learner import learning_rate

# --- compose ----------------------------------------------------------------------------------


def test_weighted_sum_and_geometric_mean_by_hand() -> None:
    values = {"alignment": 0.5, "quality": 0.8}
    weights = {"alignment": 0.6, "quality": 0.4}
    assert compose(values, FinalReward(weights=weights)) == pytest.approx(0.62)
    geometric = FinalReward(op="geometric_mean", weights=weights)
    assert compose(values, geometric) == pytest.approx(0.5**0.6 * 0.8**0.4)


def test_weights_are_relative() -> None:
    values = {"a": 0.2, "b": 1.0}
    assert compose(values, FinalReward(weights={"a": 3, "b": 1})) == pytest.approx(0.4)
    squared = FinalReward(op="geometric_mean", weights={"a": 2, "b": 2})
    assert compose(values, squared) == pytest.approx(math.sqrt(0.2))


def test_without_weights_all_rewards_count_equally_and_parts_do_not() -> None:
    values = {"a": 0.2, "b": 0.6, "a/detail": 9.0}
    assert compose(values, FinalReward()) == pytest.approx(0.4)


def test_a_zero_reward_makes_only_the_geometric_mean_zero() -> None:
    values = {"a": 0.0, "b": 1.0}
    assert compose(values, FinalReward(op="geometric_mean")) == 0.0
    assert compose(values, FinalReward()) == pytest.approx(0.5)


def test_an_ungraded_reward_that_counts_makes_the_final_reward_none() -> None:
    assert compose({"a": None, "b": 1.0}, FinalReward()) is None
    assert compose({"a": None, "b": 1.0}, FinalReward(weights={"b": 1})) == 1.0
    assert compose({"a": None, "b": 1.0}, FinalReward(weights={"a": 0, "b": 1})) == 1.0
    assert compose({"a": None}, FinalReward(weights={"a/part": 1})) is None


# --- metrics ----------------------------------------------------------------------------------


def test_metrics_of_two_ranks_keep_their_denominators() -> None:
    first, second = Metrics(), Metrics()
    first.add("mean", 1.0)
    first.add("mean", 2.0, weight=3.0)
    second.add("mean", 10.0, weight=6.0)
    first.maximum("max", 4.0)
    second.maximum("max", -4.0)
    first.total("sum", 2.5)
    second.total("sum", 4.0)
    second.add("only here", 7.0)
    merged = Metrics.merge([first.state(), second.state()])
    assert merged == {
        "mean": pytest.approx((1 + 6 + 60) / 10),
        "max": 4.0,
        "sum": 6.5,
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


def test_warm_up_then_linear_decay_by_hand() -> None:
    rates = [learning_rate(i, 7, 4.0, 2, 0.25) for i in range(7)]
    assert rates == pytest.approx([2.0, 4.0, 4.0, 3.25, 2.5, 1.75, 1.0])


def test_the_learning_rate_is_constant_by_default() -> None:
    assert [learning_rate(i, 3, 1e-5, 0, 1.0) for i in range(3)] == [1e-5] * 3
    assert learning_rate(0, 1, 1e-5, 0, 0.1) == 1e-5
    assert learning_rate(9, 5, 1.0, 0, 0.1) == pytest.approx(0.1)
