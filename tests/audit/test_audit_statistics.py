"""The statistics of an audit, against values computed by hand and by SciPy; verdicts about judges
of known quality."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from scipy.stats import mannwhitneyu

from benchmarks import audit_power
from rl.tools.commands import audit_judge as statistics


def area(right: Sequence[float], wrong: Sequence[float]) -> tuple[float, statistics.Interval]:
    """Of one pair a case."""
    return statistics.auroc(np.arange(len(right)), np.array(right), np.array(wrong))


def test_auroc_counts_ties_as_half() -> None:
    # 0.9 > 0.5, 0.9 > 0.1, 0.5 = 0.5, 0.5 > 0.1
    assert area([0.9, 0.5], [0.5, 0.1])[0] == 3.5 / 4
    empty, interval = area([], [])
    assert math.isnan(empty) and np.isnan(interval).all()


def test_auroc_is_the_share_of_the_mann_whitney_statistic() -> None:
    rng = np.random.default_rng(3)
    right, wrong = rng.integers(0, 8, 40) + 1.0, rng.integers(0, 8, 40) + 0.0
    assert area(right, wrong)[0] == pytest.approx(mannwhitneyu(right, wrong).statistic / 40**2)


def test_auroc_interval_by_hand() -> None:
    """Right 1, 0, 1, 1 against wrong 0.5: shares won 1, 0, 1, 1 with the variance 1/4, so that the
    AUROC 3/4 has the variance 1/16, and 3/16 / (1/16) = 3 results. Without an error two results a
    case count: 4 of 4 in two cases. Pairs of one case do not count as cases of their own."""
    three = pytest.approx(statistics.wilson_interval(0.75, 3))
    assert area([1, 0, 1, 1], [0.5] * 4)[1] == area([0.5] * 4, [0, 1, 0, 0])[1] == three
    assert area([1, 1], [0, 0])[1] == pytest.approx(statistics.wilson_interval(1.0, 4))
    thrice = [np.repeat(each, 3) for each in (np.arange(4), [1.0, 0, 1, 1], [0.5] * 4)]
    assert statistics.auroc(*thrice)[1] == three


def test_auroc_interval_covers_the_true_value_in_most_draws() -> None:
    """True value of N(1, 1) against N(0, 1): Phi(1 / sqrt 2) = 0.760."""
    rng = np.random.default_rng(0)
    bounds = [area(rng.normal(1, 1, 40), rng.normal(0, 1, 40))[1] for _ in range(400)]
    assert 370 <= sum(low <= 0.760 <= high for low, high in bounds) <= 398


@pytest.mark.parametrize("scale", audit_power.SCALES)
@pytest.mark.parametrize("kinds", [["worse"], audit_power.WRONG[:3]], ids=len)
def test_verdicts_agree_with_the_known_quality(scale: str, kinds: list[str]) -> None:
    """With 64 cases an AUROC of 0.97 passes and one of 0.85 fails, on fine and coarse scales; with
    16 cases they may be undecided. Of 60 audits 3 may err."""
    num = 60
    for auroc, right, wrong in ((0.97, "pass", "fail"), (0.85, "fail", "pass")):
        assert audit_power.rates(scale, auroc, kinds, 64, num)[right] >= num - 3
        few = audit_power.rates(scale, auroc, kinds, 16, num)
        assert few[wrong] <= 3 and few["undecided"] > 0


@pytest.mark.parametrize("scale", audit_power.SCALES)
def test_a_judge_blind_to_one_kind_fails_for_it_by_name(scale: str) -> None:
    kinds, blind = audit_power.WRONG[:5], audit_power.WRONG[3]
    for num_cases in (32, 64):
        counts = audit_power.rates(scale, 0.99, kinds, num_cases, 20, blind)
        assert counts["named"] == 20 and counts["pass"] == 0


def test_wilson_interval_by_hand() -> None:
    """8 of 10, Wilson 1927: (0.490, 0.943)."""
    assert statistics.wilson_interval(0.8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    low, high = statistics.wilson_interval(1.0, 16)
    assert (round(low, 3), high) == (0.806, 1.0)


def test_noise_of_readings_by_hand() -> None:
    """Two pictures, two readings each, with the variances 2 and 0."""
    assert statistics.noise_sd(np.array([[0.0, 2.0], [3.0, 3.0]])) == pytest.approx(1.0)
