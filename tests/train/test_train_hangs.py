"""One of two ranks hangs or is killed in a real run: it is named, what is finished is saved, every
stack is in the logs, and `--retries` goes on from there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny_loop

from rl.ranks import endings

SCRIPT = tiny_loop.TESTS / "train_on_ranks.py"
LIMIT_S = 90


class Ended:
    """Of a run of two ranks, the last of which is troubled in its second iteration."""

    def __init__(self, models: dict[str, str], folder: Path, trouble: str, *options: str) -> None:
        config = tiny_loop.config_of(
            models,
            folder,
            num_iterations=3,
            prompts_per_iteration=4,
            rewards={"brightness": {"type": "tests.brightness_reward"}},
            judge={},
            evaluation={"every_n_iterations": 0},
            checkpoint={"save_every_n_iterations": 3},
            hang_limit_s=LIMIT_S,
        )
        config["optimizer"] |= {"backend": "torch"}
        path = tiny_loop.write_config(folder, config)
        command = [sys.executable, "-m", "rl.simple_launch", "--nproc", "2", *options]
        process = subprocess.Popen(
            [*command, str(SCRIPT), str(path)],
            env=os.environ
            | {"PYTHONPATH": f"{tiny_loop.REPO}:{tiny_loop.TESTS}", "TROUBLE": trouble},
            cwd=tiny_loop.REPO,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None
        self.lines: list[tuple[float, str]] = []
        """(monotonic s, line of stderr)."""
        for line in process.stderr:
            self.lines.append((time.monotonic(), line))
        self.ended_s = time.monotonic()
        self.code = process.wait()
        self.run_dir = folder / "tiny"

    @property
    def saved(self) -> list[str]:
        return sorted(path.name for path in (self.run_dir / "checkpoints").glob("step_*"))

    def at_s(self, pattern: str) -> float:
        found = [at_s for at_s, line in self.lines if re.search(pattern, line)]
        assert found, self.lines
        return found[0]

    def stacks(self, rank: int) -> str:
        log = (self.run_dir / f"logs/rank_{rank}.log").read_text()
        return log[log.index("(most recent call first)") :]


@pytest.mark.slow
def test_a_stopped_rank_is_named_woken_and_nothing_is_lost(
    models: dict[str, str], tmp_path: Path
) -> None:
    ended = Ended(models, tmp_path, "frozen")
    named_s = ended.at_s(
        r"rank 1 has not moved on for \d+ s, in phase learn for \d+ s \(.*\): its process is "
        r"stopped .*; waiting for it: rank 0 \(in phase \w+.*\); at 90 s the run ends"
    )
    limit_s = ended.at_s("rank 1 hung for too long")
    print(f"named {LIMIT_S / 2 - (limit_s - named_s):+.1f} s after half of the limit")
    print(f"ended {ended.ended_s - limit_s:.1f} s after the limit")
    assert ended.code == endings.HUNG_CODE
    assert ended.saved == ["step_000001"]
    assert "in strike" in ended.stacks(1) and "distributed_c10d.py" in ended.stacks(0)


@pytest.mark.campaign
def test_a_rank_in_a_deadlock_is_named_and_the_others_save(
    models: dict[str, str], tmp_path: Path
) -> None:
    ended = Ended(models, tmp_path, "deadlocked")
    ended.at_s(
        r"rank 1 has not moved on for \d+ s, in phase learn .*: a deadlock, or one long call; "
        r"waiting for it: rank 0"
    )
    limit_s = ended.at_s("rank 1 hung for too long")
    print(f"ended {ended.ended_s - limit_s:.1f} s after the limit")
    assert ended.code == endings.HUNG_CODE
    assert ended.saved == ["step_000001"]
    assert "in strike" in ended.stacks(1) and "distributed_c10d.py" in ended.stacks(0)


@pytest.mark.parametrize(
    ("retries", "saved"),
    [
        pytest.param(2, "step_000003", marks=pytest.mark.campaign),
        pytest.param(1, "step_000002", marks=pytest.mark.slow),
    ],
)
def test_a_killed_rank_is_started_again_while_the_run_goes_on(
    models: dict[str, str], tmp_path: Path, retries: int, saved: str
) -> None:
    """Killed in every start's second iteration: two of three are done by then, then the third."""
    ended = Ended(models, tmp_path, "killed", "--retries", str(retries))
    ended.at_s(f"started again, 1 of {retries}: rank 1 was killed by SIGKILL")
    assert ended.saved[-1] == saved
    if retries == 2:
        ended.at_s("started again, 2 of 2: rank 1 was killed by SIGKILL")
        assert ended.code == 0
    else:
        ended.at_s("not started again: rank 1 was killed by SIGKILL, and every restart")
        assert ended.code == 128 + 9


@pytest.mark.slow
def test_an_error_of_the_program_is_not_tried_again(models: dict[str, str], tmp_path: Path) -> None:
    ended = Ended(models, tmp_path, "raised", "--retries", "3")
    ended.at_s("not started again: rank 1 failed with an error, which would come again")
    assert ended.code == 1 and ended.saved == ["step_000001"]
