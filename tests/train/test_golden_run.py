"""Five iterations reproduce recorded completions and metrics, on any CPU and number of ranks."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import golden_run
import pytest
import tiny_loop
from golden_run import NUM_ITERATIONS
from tiny_loop import assert_same_run, episodes_of, metrics_of
from tiny_ranks import run_ranks

import rl.train

pytestmark = pytest.mark.slow

FORWARD_TOL = 1e-3
"""Tolerance of any token's log-prob under the weights of its iteration."""


@pytest.fixture(scope="module")
def uninterrupted(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted")
    tiny_loop.run_forked(tiny_loop.write_config(folder, golden_run.config_of(models, folder)))
    return folder / "tiny"


def assert_golden(run_dir: Path) -> None:
    rows = metrics_of(run_dir)[1:]
    assert [row["iteration"] for row in rows] == list(range(1, NUM_ITERATIONS + 1))
    golden_run.assert_recorded(rows)
    assert max(row["mismatch/max_abs_dlogp"] for row in rows) < FORWARD_TOL


def test_five_iterations_match_the_golden_run(uninterrupted: Path) -> None:
    """A commit that changes these numbers says why and records them again."""
    assert_golden(uninterrupted)


def test_a_run_resumes_on_two_ranks_and_then_on_one(
    models: dict[str, str], uninterrupted: Path, tmp_path: Path
) -> None:
    def resume(folder: Path, num_ranks: int, num_iterations: int) -> None:
        changes = {"world_size": num_ranks, "num_iterations": num_iterations}
        path = tiny_loop.write_config(folder, golden_run.config_of(models, folder, **changes))
        run_ranks(rl.train.main, num_ranks, [str(path)])

    first, second = tmp_path / "one", tmp_path / "other"
    resume(first, 1, 2)
    shutil.copytree(first, second)
    for folder in (first, second):
        resume(folder, 2, 4)
    assert_same_run(first / "tiny", second / "tiny", 4)
    resume(first, 1, 5)
    assert_golden(first / "tiny")
    assert identities(first / "tiny") == identities(uninterrupted)


def identities(run_dir: Path) -> list[list[Any]]:
    keys = ("group_id", "member", "sample_id", "noise_seed", "token_ids", "reward")
    return sorted([episode[key] for key in keys] for episode in episodes_of(run_dir))
