"""The gap between two judges: by hand, and its rates of false and of missed alarms."""

from __future__ import annotations

import numpy as np
import pytest

from rl.run.alarms import LEAST_GAP, Rewards, gap_of, slope_of


def test_slope_and_correlation_by_hand() -> None:
    x = np.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8])
    y = np.array([0.2, 0.1, 0.4, 0.3, 0.6, 0.5, 0.8, 0.7])
    slope, error, correlation = slope_of(list(zip(x, y, strict=True)))
    # Sums of squares 0.42, of products 0.38; residual 0.42 - 0.38^2 / 0.42 with 6 free.
    assert slope == pytest.approx(0.38 / 0.42) and correlation == pytest.approx(0.38 / 0.42)
    assert error == pytest.approx(((0.42 - 0.38**2 / 0.42) / 6 / 0.42) ** 0.5)
    assert slope_of(list(zip(x, -y, strict=True))) == (0, 0, pytest.approx(-0.38 / 0.42))
    assert slope_of([(0.5, value) for value in y]) == (0, 0, None), "equal rewards"
    assert slope_of([(0.1, 0.1), (0.2, 0.2)]) == (0, 0, None), "two samples"


def test_the_gaps_error_has_both_sources() -> None:
    first = {str(i): (i / 10, 0.5 + (-1) ** i * 0.1 + i / 20) for i in range(8)}
    now = {key: (one + 0.2, two + 0.01 * int(key)) for key, (one, two) in first.items()}
    slope, slope_error, _ = slope_of(list(first.values()))
    gap, gain = gap_of(first, {**now, "new": (1.0, 0.0)}, {key: [key] for key in now}) or (None, 0)
    lags = [slope * 0.2 - 0.01 * i for i in range(8)]
    assert gap is not None and gap.num_clusters == 8 and gain == pytest.approx(0.2)
    assert gap.mean == pytest.approx(np.mean(lags))
    assert gap.error == pytest.approx((np.var(lags, ddof=1) / 8 + (slope_error * 0.2) ** 2) ** 0.5)
    assert gap_of(first, {}, {}) is None


def alarms(seed: int, gain: float, second_gain: float, noise: tuple[float, float]) -> bool:
    """Whether one of 10 evaluations of 64 samples raises an alarm. The quality (0..1) of each
    sample's picture changes by chance at every evaluation and rises by `gain` for the judge and by
    `second_gain` for the second one, which uses half the scale; `noise`: of each judge."""
    generator = np.random.default_rng(seed)
    base, first = generator.uniform(0, 0.6, 64), {}
    for share in np.linspace(0, 1, 11):
        quality = base + generator.normal(0, 0.2, 64)
        one = quality + gain * share + generator.normal(0, noise[0], 64)
        two = 0.5 * (quality + second_gain * share) + generator.normal(0, noise[1], 64)
        pairs = zip(np.clip(one, 0, 1).tolist(), np.clip(two, 0, 1).tolist(), strict=True)
        now: dict[str, Rewards] = {str(i): pair for i, pair in enumerate(pairs)}
        first = first or now
        gap, gained = gap_of(first, now, {key: [key] for key in now}) or (None, 0.0)
        if gap and gap.is_alarming and gap.mean > LEAST_GAP and gained >= 0:
            return True
    return False


@pytest.mark.parametrize("gain", [0.0, 0.4])
@pytest.mark.parametrize("noise", [(0.05, 0.05), (0.2, 0.1)])
def test_at_most_one_sound_run_in_twenty_raises_an_alarm(
    gain: float, noise: tuple[float, float]
) -> None:
    assert sum(alarms(seed, gain, gain, noise) for seed in range(40)) <= 2


def test_most_exploits_raise_an_alarm() -> None:
    """The judge's rewards rise by 0.4 and the quality falls by 0.1, at noise of half a point."""
    assert sum(alarms(seed, 0.4, -0.1, (0.05, 0.05)) for seed in range(40)) >= 36
