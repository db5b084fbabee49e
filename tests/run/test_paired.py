"""Errors and intervals of paired differences whose samples share source pictures."""

from __future__ import annotations

import numpy as np
import pytest

from rl.run.paired import Paired, interval, paired, student


def test_paired_differences() -> None:
    assert paired([]) is None
    assert paired([0.5]) == Paired(0.5, None, 1)
    differences = paired([0.1, 0.3, 0.2])
    assert differences == paired([0.1, 0.3, 0.2], [["a"], ["b"], ["c"]])
    assert (differences.mean, differences.num_clusters) == (pytest.approx(0.2), 3)
    assert differences.error == pytest.approx(0.1 / 3**0.5)


def test_samples_that_share_a_picture_count_as_one() -> None:
    once, names = [0.1, 0.3, 0.2], [["a"], ["b"], ["c"]]
    fourfold = paired(once * 4, names * 4)
    assert fourfold.num_clusters == 3
    assert fourfold.error == pytest.approx(paired(once).error)
    assert paired([0.1, 0.3, 0.2, 0.4], [["a", "b"], ["c"], ["c", "b"], ["d"]]).num_clusters == 2
    assert paired(once, [["a"]] * 3).error is None, "one cluster has no error"
    assert interval(once, [["a"]] * 3) is None


@pytest.mark.parametrize(
    ("fall", "alarms"),
    [
        (Paired(0.10, 0.03, 64), True),
        (Paired(0.10, 0.03, 4), False),  # only four source pictures
        (Paired(0.10, 0.04, 64), False),  # noise
        (Paired(0.03, 0.0, 16), True),  # all falls equal
        (Paired(0.019, 0.001, 64), False),  # significant but too small to matter
        (Paired(-0.10, 0.01, 64), False),  # a rise
        (Paired(0.5, None, 1), False),  # one sample has no error
    ],
)
def test_a_fall_alarms_beyond_noise(fall: Paired, alarms: bool) -> None:
    assert fall.is_alarming == alarms


def test_quantiles_match_tables_of_students_t() -> None:
    assert student(1.96, 7) == pytest.approx(2.365, abs=2e-3)
    assert student(1.96, 63) == pytest.approx(1.998, abs=2e-3)
    assert student(3.0, 15) == pytest.approx(3.586, abs=2e-3)


@pytest.mark.parametrize(("clusters", "size", "shared"), [(64, 1, 0.0), (16, 4, 0.6), (8, 8, 0.6)])
def test_the_95_percent_interval_covers_95_percent(
    clusters: int, size: int, shared: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Resampling samples instead of pictures would cover 74 % for 16 x 4 and 56 % for 8 x 8."""
    monkeypatch.setattr("rl.run.paired.NUM_RESAMPLES", 500)
    generator = np.random.default_rng(5)
    names = [[i // size] for i in range(clusters * size)]
    num_covered = 0
    for _ in range(200):
        pictures = generator.normal(0.3, shared**0.5, size=(clusters, 1))
        values = (
            pictures + generator.normal(0, (1 - shared) ** 0.5, size=(clusters, size))
        ).ravel()
        low, high = interval(values.tolist(), names) or (0, 0)
        num_covered += low <= 0.3 <= high
    assert 180 <= num_covered <= 199


def test_equal_differences_have_no_interval_of_width_zero() -> None:
    assert interval([0.999] * 16) is None
    assert interval([0.998, 1.0] * 8) is None, "nearly equal differences have none either"
    assert interval([0.001, 0.003] * 32) is not None, "small ones may differ"
    assert interval([0.0] * 16) is None
