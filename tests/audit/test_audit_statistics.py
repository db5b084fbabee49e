"""The statistics of an audit, against values computed by hand and by SciPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import mannwhitneyu

from rl.audit import audit_statistics as statistics


def test_auroc_counts_ties_as_half() -> None:
    right, wrong = np.array([0.9, 0.5]), np.array([0.5, 0.1])
    # 0.9 > 0.5, 0.9 > 0.1, 0.5 = 0.5, 0.5 > 0.1
    assert statistics.auroc(right, wrong) == 3.5 / 4
    assert math.isnan(statistics.auroc(right, np.array([])))


def test_auroc_is_the_share_of_the_mann_whitney_statistic() -> None:
    rng = np.random.default_rng(3)
    right, wrong = rng.integers(0, 8, 40) + 1.0, rng.integers(0, 8, 30) + 0.0
    expected = mannwhitneyu(right, wrong).statistic / (40 * 30)
    assert statistics.auroc(right, wrong) == pytest.approx(expected)


@pytest.mark.slow
def test_auroc_interval_covers_the_true_value_in_most_draws() -> None:
    """True value of N(1, 1) against N(0, 1): Phi(1 / sqrt 2) = 0.760."""
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(40):
        pairs = list(zip(rng.normal(1, 1, 40), rng.normal(0, 1, 40), strict=True))
        low, high = statistics.auroc_interval(pairs)
        hits += low <= 0.760 <= high
    assert hits >= 34


def test_wilson_interval_by_hand() -> None:
    """8 of 10, Wilson 1927: (0.490, 0.943)."""
    assert statistics.wilson_interval(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    low, high = statistics.wilson_interval(16, 16)
    assert (round(low, 3), high) == (0.806, 1.0)


def test_reliability_by_hand_within_groups() -> None:
    """Two groups, two pictures, two readings. Picture means (1, 3) and (11, 13); within each
    group the deviations are -1 and 1, so MSB = 2 * 4 / (4 - 2) = 4. Variances 2, 0, 2, 0:
    MSW = 1. ICC = (4 - 1) / (4 + 1) = 0.6; the distance between the groups does not count."""
    groups = [np.array([[0.0, 2.0], [3.0, 3.0]]), np.array([[10.0, 12.0], [13.0, 13.0]])]
    assert statistics.reliability(groups) == pytest.approx(0.6)
    assert statistics.noise_sd(np.concatenate(groups)) == pytest.approx(1.0)
    assert math.isnan(statistics.reliability([np.full((3, 2), 0.7)]))


def test_reliability_of_simulated_readings() -> None:
    """Signal and noise of one size: one reading repeats half of its variance."""
    rng = np.random.default_rng(1)
    groups = [rng.normal(0, 1, (8, 1)) + rng.normal(0, 1, (8, 3)) for _ in range(400)]
    assert statistics.reliability(groups) == pytest.approx(0.5, abs=0.03)


def test_readings_for_a_reliability_by_hand() -> None:
    """The mean of 4 readings of reliability 0.5 has 4 * 0.5 / (1 + 3 * 0.5) = 0.8."""
    assert statistics.readings_for(0.5, 0.8) == 4
    assert statistics.readings_for(0.95, 0.8) == 1
    assert statistics.readings_for(0.0, 0.8) is None
    assert statistics.readings_for(math.nan, 0.8) is None


def test_levels_and_the_common_value() -> None:
    assert statistics.effective_levels([0.0, 1.0] * 5) == pytest.approx(2.0)
    assert statistics.effective_levels([0.5] * 5) == pytest.approx(1.0)
    assert statistics.common_value([1.0, 0.5, 0.5, 1.0], [0.0, 0.5, 0.0, 0.0]) == (0.5, 0.25)
    assert statistics.common_value([1.0], [0.0])[1] == 0.0
