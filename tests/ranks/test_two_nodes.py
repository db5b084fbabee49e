"""A run on two nodes that lose their network, and its resume."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_loop
import tiny_nodes
from tiny_loop import assert_same_run
from tiny_nodes import ADDRESSES, Nodes
from tiny_ranks import run_ranks
from tiny_waits import wait_for

import rl.train
from rl.ranks.supervision import LOST_S

pytestmark = pytest.mark.slow

NUM_ITERATIONS = 4
PATIENCE_S = 600


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    if why := tiny_nodes.why_not():
        pytest.skip(why)
    with tiny_nodes.two_nodes() as nodes:
        yield nodes


def write_config(models: dict[str, str], folder: Path, **changes: int) -> Path:
    settings = {"num_iterations": NUM_ITERATIONS, "checkpoint": {"save_every_n_iterations": 100}}
    config = tiny_loop.without_judge(models, folder, **settings, **changes)
    return tiny_loop.write_config(folder, config)


@pytest.fixture(scope="module")
def plain(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two ranks on one node that is not interrupted."""
    folder = tmp_path_factory.mktemp("plain")
    run_ranks(rl.train.main, 2, [str(write_config(models, folder, world_size=2))])
    return folder / "tiny"


class Launched:
    """The run, started with the same command on both nodes."""

    def __init__(self, nodes: Nodes, models: dict[str, str], folder: Path) -> None:
        path = write_config(models, folder)
        options = ["--nproc", "1", "--nnodes", "2", "--rdzv-endpoint", f"{ADDRESSES[0]}:29777"]
        command = [sys.executable, "-m", "rl.simple_launch", *options, "--node-rank"]
        self.run_dir = folder / "tiny"
        self.outputs = [folder / f"node_{node}.txt" for node in range(2)]
        self.processes = [
            nodes.start(node, [*command, str(node), str(path)], self.outputs[node])
            for node in range(2)
        ]

    def output(self, node: int) -> str:
        return self.outputs[node].read_text()

    def codes(self) -> list[int]:
        return [process.wait(PATIENCE_S) for process in self.processes]

    def has_done(self, num_iterations: int) -> bool:
        assert [process.poll() for process in self.processes] == [None, None], self.output(0)
        lines = self.run_dir / "metrics.jsonl"
        return lines.is_file() and lines.read_text().count("\n") > num_iterations


def test_a_network_loss_is_named_on_both_nodes_and_loses_no_finished_iteration(
    nodes: Nodes, models: dict[str, str], plain: Path, tmp_path: Path
) -> None:
    run = Launched(nodes, models, tmp_path)
    wait_for(lambda: run.has_done(2), PATIENCE_S)
    with nodes.cut():
        start = time.monotonic()
        for node, other in ((0, "node 1"), (1, "node 0")):
            text = f"{other} has been unreachable for"
            wait_for(lambda node=node, text=text: text in run.output(node), PATIENCE_S)
            named_s = time.monotonic() - start
            assert named_s < LOST_S + 15, run.output(node)
            print(f"node {node} named it after {named_s:.0f} s")
        assert run.codes() == [1, 1], run.output(0) + run.output(1)
        print(f"both ended after {time.monotonic() - start:.0f} s")
    [saved] = tiny_loop.saved_in(run.run_dir)
    assert saved in ("step_000002", "step_000003"), "the network was cut in time"
    resumed = Launched(nodes, models, tmp_path)
    assert resumed.codes() == [0, 0], resumed.output(0)
    assert "resumed from" in resumed.output(0)
    assert_same_run(plain, run.run_dir, NUM_ITERATIONS)
