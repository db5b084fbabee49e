"""Real processes make progress, wait or hang; the watch reports and ends only those that hang."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import tiny_ranks
from tiny_waits import wait_for

from rl.ranks import heartbeat, supervision
from rl.ranks.supervision import HangWatch

pytestmark = pytest.mark.slow

LIMIT_S = 8.0
"""A rank that hangs this long ends the run; it is logged after half of the time."""
SCRIPT = """
    import ctypes, os, signal, sys, threading, time
    from pathlib import Path
    from rl.ranks import heartbeat, supervision

    def hang_in(library):
        mutex = ctypes.create_string_buffer(64)
        library.pthread_mutex_lock(mutex)
        library.pthread_mutex_lock(mutex)

    os.setsid()
    heartbeat.start(Path(sys.argv[1]), open(sys.argv[2], "a"))
    peers = {"__name__": "torch.distributed.distributed_c10d", "threading": threading}
    exec("def all_gather(): threading.Event().wait()", peers)
    with heartbeat.phase("learn"):
        exec(sys.argv[3])
"""
RANK_CODE = {
    "moves": "while True: " + ", ".join(["time.sleep(0.02)"] * 2 * heartbeat.FEW_PLACES),
    "stopped": "os.kill(os.getpid(), signal.SIGSTOP)\nwhile True: time.sleep(0.02)",
    "python": "lock = threading.Lock(); lock.acquire(); lock.acquire()",
    "spins": "while True: pass",
    "polls": "while True: time.sleep(0.02)",
    "c": "hang_in(ctypes.CDLL(None))",
    "interpreter": "hang_in(ctypes.PyDLL(None))",
    "collective": "peers['all_gather']()",
    "judge": "with heartbeat.phase('judge_wait'): threading.Event().wait()",
}
IDLE = "has made no progress for [45] s"
STUCK = "a deadlock, or one long call"
LEARN = r"in phase learn for \d+ s \(\S+\)"
END = r"at 8 s the run ends \(hang_limit_s\)"


@dataclass(frozen=True)
class Case:
    """The ranks of one launcher; each runs the code of one key of `RANK_CODE`."""

    ways: tuple[str, ...]
    expected: str
    """Pattern of the one log line; '' if there is none."""
    is_one_node: bool = True


CASES = {
    "none": Case(("moves", "judge"), ""),
    "one waits for one that makes progress": Case(("collective", "moves"), ""),
    "one waits for the judge": Case(("collective", "judge"), ""),
    "stopped": Case(
        ("collective", "moves", "stopped", "collective"),
        rf"rank 2 {IDLE}, {LEARN}: its process is stopped \(kill -CONT \d+ resumes it\); "
        rf"rank 0 waits for it; rank 3 waits for it; {END}",
    ),
    "a deadlock in Python": Case(
        ("python", "collective"), rf"rank 0 {IDLE}, {LEARN}: {STUCK}; rank 1 waits for it; {END}"
    ),
    "spins": Case(("moves", "spins"), rf"rank 1 {IDLE}, {LEARN}: {STUCK}; {END}"),
    "polls": Case(("moves", "polls"), rf"rank 1 {IDLE}, {LEARN}: {STUCK}; {END}"),
    "a deadlock in C": Case(("c", "judge"), rf"rank 0 {IDLE}, {LEARN}: {STUCK}; {END}"),
    "C that holds the GIL": Case(
        ("moves", "interpreter"), rf"rank 1 {IDLE}, {LEARN}: Python does not run in it: .*; {END}"
    ),
    "each waits for another": Case(
        ("collective", "collective"),
        rf"rank \d {IDLE}, .*: all ranks here wait for other ranks; {END}",
    ),
    "all wait for another node": Case(
        ("collective", "collective"),
        rf"rank \d {IDLE}, .* \(Python, in torch\): all ranks here wait for other ranks",
        is_one_node=False,
    ),
}


class Ranks:
    """One process for each of `RANK_CODE`, and a hang watch over the processes of each case."""

    def __init__(self, folder: Path) -> None:
        self.beats = {way: folder / f"{way}.json" for way in RANK_CODE}
        self.logs = {way: folder / f"{way}.log" for way in RANK_CODE}
        self.processes = {
            way: tiny_ranks.start(SCRIPT, str(self.beats[way]), str(self.logs[way]), code)
            for way, code in RANK_CODE.items()
        }
        wait_for(lambda: all(self._has_begun(way) for way in RANK_CODE))
        self.lines: dict[str, list[str]] = {name: [] for name in CASES}
        self.watches = {name: self._watch(name) for name in CASES}
        self.ended: set[str] = set()
        """Cases whose run the watch would end now."""

    def _has_begun(self, way: str) -> bool:
        beat = heartbeat.read(self.beats[way])
        return beat is not None and beat.phase.startswith("learn")

    def of(self, name: str) -> dict[int, subprocess.Popen[str]]:
        return {rank: self.processes[way] for rank, way in enumerate(CASES[name].ways)}

    def _watch(self, name: str) -> HangWatch:
        beats = {rank: self.beats[way] for rank, way in enumerate(CASES[name].ways)}
        pids = {rank: process.pid for rank, process in self.of(name).items()}
        return HangWatch(beats, pids, LIMIT_S, CASES[name].is_one_node, self.lines[name].append)

    def look(self, for_s: float) -> None:
        end_s = time.monotonic() + for_s
        while time.monotonic() < end_s:
            self.ended = {name for name, watch in self.watches.items() if watch.look()}
            time.sleep(0.25)


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    started = Ranks(tmp_path)
    yield started
    for process in started.processes.values():
        process.kill()
        process.communicate()


def test_a_hanging_rank_is_named_and_ended_but_not_a_waiting_one(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps depend on each other: each needs the time that passed before it."""
    ranks.look(LIMIT_S / 2 + 1.5)
    for name, case in CASES.items():
        lines = ranks.lines[name]
        assert len(lines) == bool(case.expected), (name, lines)
        assert re.fullmatch(case.expected, "".join(lines)), (name, lines)
    assert not ranks.ended

    ranks.look(LIMIT_S / 2)  # they have hung too long, without waiting for another node
    assert ranks.ended == {name for name, case in CASES.items() if END in case.expected}

    for process in ranks.processes.values():
        process.send_signal(heartbeat.STACKS_SIGNAL)
        process.send_signal(signal.SIGCONT)
    ranks.look(2.0)
    for way, log in ranks.logs.items():
        assert "most recent call first" in log.read_text(), way
    assert "in hang_in" in ranks.logs["interpreter"].read_text()
    assert "in all_gather" in ranks.logs["collective"].read_text()
    assert 2 not in ranks.watches["stopped"].hung, "SIGCONT resumed it"
    interpreter = ranks.watches["C that holds the GIL"]
    assert list(interpreter.hung) == [1]

    # A launcher that was itself stopped for an hour (Ctrl-Z, then `fg`) reports no rank.
    monkeypatch.setattr(interpreter, "_looked_s", time.monotonic() - 3600)
    interpreter.look()
    assert not interpreter.hung

    # A hanging rank gets SIGTERM first. These ranks have no handler for it and end at once.
    watch, lines = ranks.watches["spins"], list[str]()
    ending = supervision.Ranks(ranks.of("spins"), watch, lines.append).end_hung()  # type: ignore[arg-type]
    assert (ending.code, ending.what) == (124, "rank 1 hung")
    assert len(lines) == 1 and "rank 1 hung for too long (hang_limit_s)" in lines[0]
    assert all(process.poll() is not None for process in ranks.of("spins").values())
