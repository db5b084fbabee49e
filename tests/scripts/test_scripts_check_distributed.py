"""`rl check-distributed` reports whether each communicator sums correctly over the ranks."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from tiny_config import REPO
from tiny_ranks import run_ranks

from rl.ranks.dist import Dist
from rl.tools.commands import check_distributed as check

TWO = Dist(rank=1, world_size=2)
"""Rank 1's tensor is rank 0's plus one."""


@pytest.mark.parametrize("first", [0, 999_999, 1_000_002])
def test_a_single_wrong_value_is_reported_wherever_it_is(first):
    def sum_(tensor: torch.Tensor) -> torch.Tensor:
        total = tensor + (tensor - 1)
        total[first] += 1
        return total

    wrong = check.wrong_sum(sum_, TWO, "cpu")
    assert "rank 1: 1 of 1000003 values" in wrong and str(first) in wrong
    assert check.wrong_sum(lambda tensor: tensor + (tensor - 1), TWO, "cpu") == ""
    assert "1000003 of 1000003 values" in check.wrong_sum(lambda tensor: 2 * tensor, TWO, "cpu")


def test_a_single_process_skips_the_check(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    check.main()
    out = capsys.readouterr().out
    assert out.startswith("PyTorch GLOO skipped: ") and "--nproc 2" in out


def test_gloo_and_nccl_are_checked_on_gpus():
    communicators = list(check.communicators(Dist(0, 2, 0, "cuda:0")))
    assert [name for name, _, _ in communicators] == ["PyTorch GLOO", "PyTorch NCCL"]
    assert not any(isinstance(sum_, str) for _, _, sum_ in communicators)


@pytest.mark.slow
def test_a_rank_that_does_not_answer_ends_the_check():
    code = (
        "import time; from rl.tools.commands import check_distributed as check\n"
        "check.TIMEOUT_S = 0.05; check.communicators = lambda _: time.sleep(30); check.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 1 and "rank 0 waited" in done.stderr


def sum_wrongly_on_rank_1() -> tuple[Any, str]:
    """(exit code, output) of a rank when Gloo sums correctly and another communicator does not."""
    import contextlib
    import io

    def communicators(dist: Dist) -> Any:
        yield "PyTorch GLOO", "cpu", dist.sum_
        yield "Other", "cpu", lambda tensor: dist.sum_(tensor) + dist.rank

    check.communicators = communicators
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            check.main()
        except SystemExit as error:
            return error.code, out.getvalue()
    return 0, out.getvalue()


@pytest.mark.slow
def test_every_rank_fails_if_one_sums_wrongly_and_rank_0_reports_it():
    (reason, lines), (exit_code, output_of_1) = run_ranks(sum_wrongly_on_rank_1, 2)
    assert lines == "PyTorch GLOO is successful!\n" and output_of_1 == ""
    assert "Other sums wrongly on rank 1" in reason and "rank 0:" not in reason
    assert exit_code == 1


@pytest.mark.slow
def test_the_launcher_checks_two_ranks(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "rl", "check-distributed", "--nproc", "2"],
        cwd=REPO,
        env={**os.environ, "TMPDIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "PyTorch GLOO is successful!",
        "PyTorch NCCL skipped: this machine has no CUDA device",
    ]
