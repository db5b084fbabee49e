"""Drift metrics, against numbers by hand."""

from __future__ import annotations

import pytest
import torch
from tiny_messages import holds

from rl.algorithm.metrics import Metrics
from rl.ranks.dist import Dist
from rl.run.alarms import HELD_OUT, Watch
from rl.run.evaluation import add_differences, check_start, state_distance


def test_states_are_compared_token_by_token() -> None:
    base = torch.tensor([[3.0, 4.0], [0.0, 2.0]])
    # Distances 0 and |(2, -2)| / 2 = sqrt 2.
    assert state_distance(torch.tensor([[3.0, 4.0], [2.0, 0.0]]), base) == pytest.approx(2**0.5 / 2)
    assert state_distance(base.bfloat16(), base.bfloat16()) == 0.0


def test_a_fall_warns_and_a_healthy_run_does_not() -> None:
    untrained = (0.9, 0.7, 0.8, 0.8)

    def falls_of(*trained: float | None) -> tuple[dict[str, float], list[str]]:
        metrics = Metrics()
        pictures_P = [[str(i)] for i in range(12)]
        pairs = zip(untrained * 3, trained * 3, strict=True)
        rewards_P = [{"untrained bare": before, "bare": now} for before, now in pairs]
        add_differences(metrics, rewards_P, pictures_P, Dist())
        line = Dist().reduce(metrics)
        return line, Watch(HELD_OUT).sentences(line | {"optimizer/steps": 1.0})

    metrics, warnings = falls_of(0.9, 0.7, 0.8, 0.7)
    assert metrics["drift/bare_fall"] == pytest.approx(0.025) and metrics["drift/alarm"] == 0
    assert not warnings
    metrics, warnings = falls_of(0.4, 0.2, 0.4, None)
    # Falls of 0.5, 0.5, 0.4, three times: mean 0.467, standard deviation 0.05, divided by sqrt(9).
    assert metrics["drift/bare_fall_error"] == pytest.approx(0.05 / 9**0.5, rel=1e-3)
    assert metrics["drift/alarm"] == 1
    assert holds(warnings, "drift/bare_fall ... learning_rate")


@pytest.mark.parametrize(
    ("references", "policy", "parts"),
    [
        ((0.9, 1.0, 0.95, 1.0), (0.3, 0.4, 0.3, 0.5), ""),
        ((0.3, 0.2, 0.25, 0.2), (0.3, 0.2, 0.1, 0.4), ""),  # a hard task
        ((0.05, 0.0, 0.1, 0.0), (0.0, 0.0, 0.1, 0.05), "earn 0.038, policy 0.038: training"),
        ((0.3, 0.4, 0.3, 0.5), (0.9, 1.0, 0.95, 1.0), "earn 0.375, policy 0.963: training"),
        ((None,) * 4, (0.0,) * 4, ""),
    ],
)
def test_references_that_earn_nothing_name_a_broken_link(
    references: tuple[float | None, ...],
    policy: tuple[float, ...],
    parts: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pairs = zip(references * 4, policy * 4, strict=True)
    rewards_P = [{"reference": right, "policy": words} for right, words in pairs]
    check_start(rewards_P, [[str(i)] for i in range(16)], Dist())
    stderr = capsys.readouterr().err
    assert holds(stderr, parts) if parts else not stderr
