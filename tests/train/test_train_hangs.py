"""A rank that hangs or is killed is named, finished work is saved, and `--retries` resumes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import tiny_loop

from rl.ranks import supervision

SLOW, CAMPAIGN = pytest.mark.slow, pytest.mark.campaign


class Ended:
    """A finished run of two ranks, the last of which had a fault in its second iteration."""

    def __init__(self, models: dict[str, str], folder: Path, trouble: str, *options: str) -> None:
        config = tiny_loop.without_judge(
            models,
            folder,
            num_iterations=3,
            prompts_per_iteration=4,
            checkpoint={"save_every_n_iterations": 3},
            hang_limit_s=90,
        )
        path = tiny_loop.write_config(folder, config)
        ended = tiny_loop.launch(path, 2, *options, TROUBLE=trouble)
        self.code, self.errors, self.run_dir = ended.returncode, ended.stderr, folder / "tiny"
        self.saved = tiny_loop.saved_in(self.run_dir)

    def has_error(self, pattern: str) -> bool:
        assert re.search(pattern, self.errors), self.errors
        return True

    def stacks(self, rank: int) -> str:
        log = (self.run_dir / f"logs/rank_{rank}.log").read_text()
        return log[log.index("(most recent call first)") :]


@pytest.mark.parametrize(
    ("trouble", "why"),
    [
        pytest.param("frozen", "its process is stopped", marks=SLOW),
        pytest.param("deadlocked", "a deadlock, or one long call", marks=CAMPAIGN),
    ],
)
def test_a_rank_that_hangs_is_named_and_the_others_save(
    models: dict[str, str], tmp_path: Path, trouble: str, why: str
) -> None:
    ended = Ended(models, tmp_path, trouble)
    message = (
        rf"rank 1 has made no progress for .*, in phase learn .*: {why}.*; rank 0 waits for it"
    )
    assert ended.has_error(message + ".*at 90 s the run ends")
    assert ended.has_error("rank 1 hung for too long")
    assert ended.code == supervision.HUNG_CODE
    assert ended.saved == ["step_000001"]
    # A stopped process must continue to write its stacks, and may have left `trigger` by then.
    assert trouble == "frozen" or "in trigger" in ended.stacks(1)
    assert "distributed_c10d.py" in ended.stacks(0)


@pytest.mark.parametrize(
    ("retries", "saved", "end", "code"),
    [
        pytest.param(2, 3, "started again, 2 of 2: rank 1 was killed", 0, marks=CAMPAIGN),
        pytest.param(1, 2, "not started again: rank 1 was killed by SIGKILL", 128 + 9, marks=SLOW),
    ],
)
def test_a_run_with_a_killed_rank_is_started_again_up_to_the_retries(
    models: dict[str, str], tmp_path: Path, retries: int, saved: int, end: str, code: int
) -> None:
    """Each attempt finishes one more iteration and is killed in the next."""
    ended = Ended(models, tmp_path, "killed", "--retries", str(retries))
    assert ended.has_error(f"started again, 1 of {retries}: rank 1 was killed by SIGKILL")
    assert ended.has_error(end) and ended.code == code
    assert ended.saved[-1] == f"step_{saved:06d}"


@pytest.mark.slow
def test_an_error_in_the_program_is_not_retried(models: dict[str, str], tmp_path: Path) -> None:
    ended = Ended(models, tmp_path, "raised", "--retries", "3")
    assert ended.has_error("not started again: rank 1 failed: exit code 1. ")
    assert ended.code == 1 and ended.saved == ["step_000001"]
