"""Drift metrics and the stock arm's cache keys, against numbers by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_messages import holds

from rl.algorithm.metrics import Metrics
from rl.api.types import Sample
from rl.ranks.dist import Dist
from rl.run.alarms import HELD_OUT, Watch
from rl.run.evaluation import Stock, add_differences, check_start, state_distance


def test_the_stock_arms_key_depends_on_every_field_of_the_sample() -> None:
    white, black = Image.new("RGB", (4, 4), "white"), Image.new("RGB", (4, 4))
    sample = Sample("a", "x", (white,), white, np.zeros((2, 2)), np.zeros((2, 2)), "colours")
    changes: list[dict[str, Any]] = [
        {"id": "b"},
        {"instruction": "y"},
        {"category": "shapes"},
        {"hidden": {"answer": 1}},
        {"sources": (black,)},
        {"sources": (white, white)},
        {"target": black},
        {"source_codes": np.zeros((1, 4))},
        {"target_codes": np.ones((2, 2))},
    ]
    stock = Stock.__new__(Stock)
    stock._settings = ""
    others = [replace(sample, **change) for change in changes]
    assert stock._key(sample) == stock._key(replace(sample, sources=(white.copy(),)))
    assert len({stock._key(one) for one in [sample, *others]}) == 1 + len(changes)


def test_states_are_compared_token_by_token() -> None:
    base = torch.tensor([[3.0, 4.0], [0.0, 2.0]])
    states = torch.tensor([[3.0, 4.0], [2.0, 0.0]])
    # Distances 0 and |(2, -2)| / 2 = sqrt 2; cosines 1 and 0.
    assert state_distance(states, base) == (pytest.approx(2**0.5 / 2), pytest.approx(0.5))
    assert state_distance(base.bfloat16(), base.bfloat16())[0] == 0.0


def test_a_fall_warns_and_a_healthy_run_does_not() -> None:
    untrained = (0.9, 0.7, 0.8, 0.8)

    def falls_of(*trained: float | None) -> tuple[dict[str, float], list[str]]:
        metrics = Metrics()
        pictures_P = [[str(i)] for i in range(12)]
        rewards = {"untrained bare": untrained * 3, "bare": trained * 3}
        add_differences(metrics, rewards, pictures_P, Dist())
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
    rewards = {"reference": references * 4, "policy": policy * 4, "bare": [None] * 16}
    rewards |= {"untrained bare": [0.5] * 16, "untrained reference": references * 4}
    check_start(rewards, [[str(i)] for i in range(16)], Dist())
    stderr = capsys.readouterr().err
    assert holds(stderr, parts) if parts else not stderr
