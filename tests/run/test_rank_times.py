"""Who is slow is told from who waits for it."""

from __future__ import annotations

import time

import pytest
import torch
from tiny_ranks import run_ranks

from rl.console.console import PhaseTimer
from rl.ranks.dist import Dist
from rl.run.metric_table import check_known
from rl.run.rank_times import rank_times


def test_the_slowest_rank_and_in_which_phase() -> None:
    seconds = [
        {"generate": 2.0, "learn": 3.0},
        {"generate": 1.0, "learn": 9.0},
        {"generate": 1.0, "learn": 3.0, "evaluate": 0.5},
    ]
    metrics = rank_times(seconds)
    assert metrics == {
        "time/generate_max_over_median": 2.0,
        "time/learn_max_over_median": 3.0,
        "time/iteration_max_over_median": 2.0,
        "time/slowest_rank": 1.0,
    }
    check_known(metrics, {})
    assert rank_times(seconds[:1]) == {}, "one rank is not compared with itself"


def wait_for_rank_1() -> list[dict[str, float]]:
    dist, timer = Dist.from_env("cpu"), PhaseTimer()
    dist.gather(None)
    for collective in (dist.barrier, lambda: dist.sum_(torch.ones(1))):
        with timer.phase("learn"):
            time.sleep(0.6 * dist.rank)
            collective()
    gathered = dist.gather(timer.own_seconds())
    assert timer.lap()["time/learn_s"] > 1.1, "the wall clock's"
    dist.close()
    return gathered


@pytest.mark.slow
def test_a_rank_that_waits_is_not_slow() -> None:
    (of_0, of_1), same = run_ranks(wait_for_rank_1, 2)
    assert same == [of_0, of_1]
    assert of_1["learn"] > 1.1 and of_0["learn"] < 0.6
    metrics = rank_times([of_0, of_1])
    assert metrics["time/slowest_rank"] == 1
    assert metrics["time/learn_max_over_median"] == pytest.approx(2, abs=0.8)
