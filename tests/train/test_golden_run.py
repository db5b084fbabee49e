"""Five iterations whose words and marks are recorded, on whatever CPU and however many ranks."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import golden_run
import pytest
import tiny_loop
from golden_run import HELD, NUM_ITERATIONS
from tiny_loop import assert_same_run, episodes_of, metrics_of
from tiny_ranks import run_ranks

import rl.train

pytestmark = pytest.mark.slow

RELATIVE, ABSOLUTE = 1e-3, 1e-5
"""Of a metric."""
NATS = 1e-3
"""Of any token's log-prob under the weights of its iteration."""


@pytest.fixture(scope="module")
def straight(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("straight")
    tiny_loop.run_forked(tiny_loop.write_config(folder, golden_run.config_of(models, folder)))
    return folder / "tiny"


def assert_golden(run_dir: Path) -> None:
    rows = metrics_of(run_dir)[1:]
    assert [row["iteration"] for row in rows] == list(range(1, NUM_ITERATIONS + 1))
    for row, expected in zip(rows, golden_run.recorded()["metrics"], strict=True):
        for name in HELD:
            near = pytest.approx(expected[name], rel=RELATIVE, abs=ABSOLUTE)
            assert row[name] == near, (name, row["iteration"])
        assert row["mismatch/max_abs_dlogp"] < NATS, row["iteration"]


def test_five_iterations_are_the_golden_ones(straight: Path) -> None:
    """A change that moves these says why in its commit, and records them anew."""
    assert_golden(straight)


def test_from_one_rank_to_two_and_back(
    models: dict[str, str], straight: Path, tmp_path: Path
) -> None:
    def go_on(folder: Path, num_ranks: int, num_iterations: int) -> None:
        changes = {"world_size": num_ranks, "num_iterations": num_iterations}
        config = golden_run.config_of(models, folder, **changes)
        path = tiny_loop.write_config(folder, config)
        run_ranks(rl.train.main, num_ranks, [str(path)])

    one, other = tmp_path / "one", tmp_path / "other"
    go_on(one, 1, 2)
    shutil.copytree(one, other)
    for folder in (one, other):
        go_on(folder, 2, 4)
    assert_same_run(one / "tiny", other / "tiny", 4)
    go_on(one, 1, 5)
    assert_golden(one / "tiny")
    assert identities(one / "tiny") == identities(straight)


def identities(run_dir: Path) -> list[list[Any]]:
    keys = ("group_id", "member", "sample_id", "noise_seed", "token_ids", "reward")
    return sorted([episode[key] for key in keys] for episode in episodes_of(run_dir))
