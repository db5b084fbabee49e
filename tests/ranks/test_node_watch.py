"""Two launchers with one store: each watches the other node."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
from tiny_messages import holds
from tiny_waits import wait_for
from torch.distributed import TCPStore

from rl.ranks import supervision
from rl.ranks.supervision import NodeWatch

pytestmark = pytest.mark.slow

Watch = Callable[[int], NodeWatch]


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def watch(lines: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    """Starts the watch of one of two nodes with two ranks each; minutes are seconds here."""
    for name in ("BEAT_S", "LOST_S"):
        monkeypatch.setattr(supervision, name, getattr(supervision, name) / 60)
    host = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    watches = []

    def start(node: int) -> NodeWatch:
        store = TCPStore("127.0.0.1", host.port, is_master=False)
        started = NodeWatch(store, node, 2, lambda line: lines.append(f"{node}: {line}"))
        watches.append(started)
        return started

    yield start
    for started in watches:
        started.leave()


def test_a_node_that_has_left_is_not_lost(watch: Watch) -> None:
    first = watch(0)
    watch(1).leave()
    time.sleep(2 * supervision.LOST_S)
    assert first.lost() == ""


def test_a_silent_node_counts_as_lost_and_is_not_waited_for(watch: Watch) -> None:
    first = watch(0)
    wait_for(first.lost)
    assert holds(first.lost(), "node 1 ... 1 s")
    start = time.monotonic()
    first.leave()
    assert time.monotonic() - start < supervision.NODE_LEAVE_S / 2


def test_the_failure_of_a_node_is_reported_on_the_others(watch: Watch, lines: list[str]) -> None:
    first, second = watch(0), watch(1)
    first.ending = "rank 0 failed: exit code 1"
    second.ending = "rank 3 failed: killed by SIGKILL"
    second.leave()
    first.leave()
    assert any(holds(line, f"0: ... node 1 ... {second.ending}") for line in lines)
