"""The simulated iteration: hand-computed cases (benchmarks/pool_scaling.py has measured ones)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rl.check.iteration_time import Iteration, Machines, bound_by, enough_workers, simulate

WORK = Iteration(
    num_ranks=1, num_groups=3, group_size=4, batch_size=2, questions=0,
    sample_s=5.0, condition_s=0.0, draw_s=1.0, judge_s=0.0, learn_s=0.0, sync_s=2.0,
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "machines", "total_s"),
    [
        # Twelve pictures, one by one; then six batches of 2 s on 1, 4 and 6 workers.
        ({}, Machines(), 5 + 12 + 2),
        ({}, Machines(workers=1), 5 + 12 + 2),
        ({}, Machines(workers=4), 5 + 2 * 2 + 2),
        ({}, Machines(workers=6), 5 + 2 + 2),
        ({}, Machines(workers=512), 5 + 2 + 2),
        # The worker holds batches 1, 2, then 4 and 6, as the rank has drawn only 3 and 5.
        ({}, Machines(workers=1, local=True), 5 + 4 * 2 + 2),
        # A rank conditions (1 s) between batches that it draws, and while workers draw.
        ({"condition_s": 1.0}, Machines(), 5 + 3 + 12 + 2),
        ({"condition_s": 1.0}, Machines(workers=1), 5 + 1 + 12 + 2),
        # Workers outpace the conditioning: groups are ready at 10, 20, 30; the last takes 2 s.
        ({"condition_s": 10.0}, Machines(workers=6), 5 + 30 + 2 + 2),
        # No overlap: one batch in all.
        ({"num_groups": 1, "group_size": 2, "condition_s": 3.0}, Machines(8), 5 + 3 + 2 + 2),
        # All six batches drawn after 2 s; 24 questions of 3 s in 2 slots.
        ({"questions": 2, "judge_s": 3.0}, Machines(6, judge_slots=2), 5 + 2 + 36 + 2),
        # Verdicts of groups 1, 2, 3 at 4, 8, 12 s after drawing; each is learnt from in 1 s.
        ({"questions": 1, "judge_s": 1.0, "learn_s": 1.0}, Machines(6), 5 + 2 + 12 + 1 + 2),
        # Learning (10 s a group) outlasts the judge: it starts with the first group's verdict.
        ({"questions": 1, "judge_s": 1.0, "learn_s": 10.0}, Machines(6), 5 + 2 + 4 + 30 + 2),
        # A batch travels 2 x 3 s; a node's link is shared.
        ({"picture_bytes": 3.0}, Machines(6, bytes_per_s=1.0), 5 + 6 * 6 + 2 + 2),
        ({"num_ranks": 2, "picture_bytes": 3.0}, Machines(12, bytes_per_s=1.0), 5 + 12 * 6 + 2 + 2),
        (
            {"num_ranks": 2, "picture_bytes": 3.0, "ranks_per_node": 1},
            Machines(12, bytes_per_s=1.0),
            5 + 6 * 6 + 2 + 2,
        ),
        # Seven pictures: batches of 2, 2, 2 and 1 on two workers.
        ({"num_groups": 1, "group_size": 7}, Machines(workers=2), 5 + 2 + 2 + 2),
    ],
)  # fmt: skip
def test_hand_computed_iterations(
    changes: dict[str, float], machines: Machines, total_s: float
) -> None:
    outcome = simulate(replace(WORK, **changes), machines)  # type: ignore[arg-type]
    assert outcome.total_s == pytest.approx(total_s)
    assert sum(outcome.phases_s.values()) == pytest.approx(total_s)
    assert min(outcome.phases_s.values()) >= -1e-9


def test_shares_of_time_in_which_workers_and_judges_are_busy() -> None:
    outcome = simulate(replace(WORK, questions=1, judge_s=0.5), Machines(4, judge_slots=8))
    assert outcome.total_s == 5 + 4 + 0.5 + 2
    assert outcome.worker_use == pytest.approx(12 / (4 * 11.5))
    assert outcome.judge_use == pytest.approx(12 * 0.5 / (8 * 11.5))


def test_the_bound_is_what_shortens_the_iteration_most() -> None:
    assert bound_by(WORK, Machines(workers=1)) == "drawing"
    assert bound_by(WORK, Machines(workers=6)) == "sampling"
    assert bound_by(replace(WORK, questions=2, judge_s=3.0), Machines(6)) == "the judge"
    assert bound_by(replace(WORK, picture_bytes=3.0), Machines(6, bytes_per_s=1.0)) == "the network"
    assert bound_by(replace(WORK, condition_s=10.0), Machines(6)) == "conditioning"


def test_enough_workers() -> None:
    assert enough_workers(WORK, Machines()) == 6
    # 1000 batches of 1 s take ceil(1000 / n): 2 s on 500 to 999 workers.
    many = replace(WORK, num_groups=250, sample_s=0.0, sync_s=0.0, batch_size=1)
    assert enough_workers(many, Machines()) == 500
    assert enough_workers(replace(WORK, draw_s=0.0), Machines()) == 0
    assert enough_workers(replace(WORK, questions=1, judge_s=1000.0), Machines()) == 0
