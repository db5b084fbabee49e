"""The check of the ranks' communicators: what it says when they sum, and when they do not."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_ranks import run_ranks

from rl.commands import check_distributed as check
from rl.ranks.dist import Dist

ROOT = Path(__file__).parents[2]
TWO = Dist(rank=1, world_size=2)
"""Rank 1's tensor is rank 0's plus one."""


@pytest.mark.parametrize("first", [0, 999_999, 1_000_002])
def test_one_wrong_value_is_found_anywhere(first):
    def sum_(mine: torch.Tensor) -> torch.Tensor:
        total = mine + (mine - 1)
        total[first] += 1
        return total

    wrong = check.wrong_sum(sum_, TWO, "cpu")
    assert "rank 1: 1 of 1000003 values" in wrong and str(first) in wrong
    assert check.wrong_sum(lambda mine: mine + (mine - 1), TWO, "cpu") == ""
    assert "1000003 of 1000003 values" in check.wrong_sum(lambda mine: 2 * mine, TWO, "cpu")


def test_one_process_says_that_it_is_alone(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    check.main()
    out = capsys.readouterr().out
    assert out.startswith("PyTorch GLOO skipped: ") and "--nproc 2" in out


def test_what_is_tried_on_gpus():
    tried = list(check.communicators(Dist(0, 2, 0, "cuda:0")))
    assert [name for name, _, _ in tried] == ["PyTorch GLOO", "PyTorch NCCL"]
    assert not any(isinstance(sum_, str) for _, _, sum_ in tried)


def test_nobody_is_waited_for_for_ever():
    code = (
        "import time; from rl.commands import check_distributed as check\n"
        "check.TIMEOUT_S = 0.05; check.communicators = lambda _: time.sleep(30); check.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "rank 0 waited" in done.stderr


def sum_wrongly_on_rank_1() -> tuple[Any, str]:
    """(exit code, lines) of a rank of a run in which Gloo sums and another communicator fails."""
    import contextlib
    import io

    def communicators(dist: Dist) -> Any:
        yield "PyTorch GLOO", "cpu", dist.sum_
        yield "Other", "cpu", lambda mine: dist.sum_(mine) + dist.rank

    check.communicators = communicators
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            check.main()
        except SystemExit as error:
            return error.code, out.getvalue()
    return 0, out.getvalue()


def test_every_rank_fails_when_one_sums_wrongly_and_rank_0_says_why():
    (reason, lines), (other, silence) = run_ranks(sum_wrongly_on_rank_1, 2)
    assert lines == "PyTorch GLOO is successful!\n" and silence == ""
    assert "Other sums wrongly on rank 1" in reason and "rank 0:" not in reason
    assert other == 1


@pytest.mark.slow
def test_two_ranks_under_the_launcher(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "rl", "check-distributed", "--nproc", "2"],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stderr
    *lines, timed = done.stdout.splitlines()
    assert lines == [
        "PyTorch GLOO is successful!",
        "PyTorch NCCL skipped: this machine has no CUDA device",
    ]
    assert timed.startswith("sum of 256 MB: ") and timed.endswith(" GB/s")
