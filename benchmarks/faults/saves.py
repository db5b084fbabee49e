"""Kills a tiny run with kill -9 before every file operation of a save, and compares its resume.

    python -m benchmarks.faults.saves                 # every operation; exit code 1 on any loss

The save of the last iteration is tested: from its optimizer step to the run's end. A kill after a
write is tried with the written file complete, cut in half, and empty.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.faults import tiny_run
from benchmarks.faults.inject import FileOperation, at_calls, at_files
from benchmarks.faults.processes import map_at_once, quiet_processes
from benchmarks.faults.tiny_run import NUM_ITERATIONS, Judge
from benchmarks.faults.trial import Harness

NOTE = "operations.txt"
"""File beside the run folder with one line per operation, in order."""


@dataclass(frozen=True)
class Kill:
    """Where a process is killed."""

    at: int
    """Number of the operation before which it is killed, from 1; 0: never."""
    left: str = "whole"
    """How much remains of the file that the previous operation wrote: whole, half or nothing."""
    name: str = ""
    """Instead of `at`: name and path of the operation."""


class KillAt:
    """An `Injection` that kills the process at the operation that `Kill` defines."""

    def __init__(self, kill: Kill) -> None:
        self._kill = kill
        self._armed = False
        self._count = 0
        self._written: tuple[Path, int] | None = None
        """(file that the previous operation wrote, its size before)"""

    def __call__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._note = os.open(run_dir.parent / NOTE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        at_calls("rl.run.saving:LastFinished.note", self._on_finished)
        at_files(run_dir, self._before)

    def _on_finished(self, _: object, done: int, *__: object) -> None:
        self._armed = done == NUM_ITERATIONS

    def _before(self, operation: FileOperation) -> None:
        if not self._armed:
            return
        self._count += 1
        line = f"{operation.name} {operation.path}"
        os.write(self._note, f"{line}\n".encode())
        if self._count == self._kill.at or line == self._kill.name:
            self._armed = False
            path, size = self._written or (self._run_dir, 0)
            if self._kill.left != "whole" and path.is_file():
                num_written = path.stat().st_size - size
                os.truncate(path, size + (num_written // 2 if self._kill.left == "half" else 0))
            os.kill(os.getpid(), signal.SIGKILL)
        path = self._run_dir / operation.path
        is_write = operation.name == "write"
        # Every file is either only appended to or only replaced.
        appends = is_write and path.name == "metrics.jsonl"
        size = path.stat().st_size if appends and path.exists() else 0
        self._written = (path, size) if is_write else None


@dataclass(frozen=True)
class Row:
    """One kill and its outcome."""

    kill: Kill
    operation: str
    disk: str
    resumed: str
    problem: str
    """'' if the resumed run equals the uninterrupted one bit for bit."""

    def __str__(self) -> str:
        cells = (self.kill.at, self.operation, self.kill.left, self.disk, self.resumed)
        outcome = self.problem or "the same run"
        return "| " + " | ".join([*map(str, cells), outcome.replace("\n", " ")]) + " |"


HEADER = (
    "| n | killed before | last written file | left on disk | resume | outcome |\n"
    "|---|---|---|---|---|---|"
)


class Saves:
    """Repeats the save of a run's last iteration, with a kill at another operation each time."""

    def __init__(self, harness: Harness, judge: Judge) -> None:
        self._harness = harness
        self._judge = judge

    def _start(self, name: str, kill: Kill) -> tuple[Path, tiny_run.Ended]:
        folder = self._harness.copy_stopped(name)
        tiny_run.prepare(folder, self._harness.rows, self._judge)
        return folder, tiny_run.start(folder, KillAt(kill))

    def operations(self) -> list[str]:
        """The file operations of a save without a kill, in order."""
        folder, ended = self._start("counted", Kill(0))
        assert ended.code == 0, ended.printed[-2000:]
        operations = _noted(folder)
        name = f"checkpoints/step_{NUM_ITERATIONS:06d}"
        for file in (folder / tiny_run.RUN / name).rglob("*.*"):
            temporary = file.relative_to(folder / tiny_run.RUN).as_posix()
            temporary = temporary.replace("/", "/.tmp-", 1)
            assert f"write {temporary}" in operations, f"no write of {temporary} was recorded"
        return operations

    def try_kill(self, kill: Kill) -> Row:
        """Kills a run, inspects its folder, resumes it and compares the result."""
        folder, ended = self._start(f"kill-{kill.at}-{kill.left}", kill)
        run_dir = folder / tiny_run.RUN
        operation = _noted(folder)[-1]
        if ended.code != -signal.SIGKILL:
            return Row(kill, operation, "", "", f"NOT KILLED: exit code {ended.code}")
        disk = _disk(run_dir)
        problem = "" if tiny_run.on_disk(run_dir) >= NUM_ITERATIONS - 1 else "LOST a checkpoint"
        again = tiny_run.start(folder)
        if again.code != 0:
            problem = f"NOT RESUMED ({again.code}): {again.printed[-300:]}"
        problem = problem or tiny_run.difference(self._harness.uninterrupted, run_dir)
        shutil.rmtree(folder)
        return Row(kill, operation, disk, _resumed(again.printed), problem)


def _noted(folder: Path) -> list[str]:
    return (folder / NOTE).read_text().strip().split("\n")


def kills_of(operations: Sequence[str]) -> list[Kill]:
    """A kill before each operation; two more after a write, with the file cut in half and empty."""
    kills = []
    for n, _ in enumerate(operations, start=1):
        kills.append(Kill(n))
        if n > 1 and operations[n - 2].startswith("write "):
            kills += [Kill(n, "half"), Kill(n, "nothing")]
    return kills


def _disk(run_dir: Path) -> str:
    """The checkpoint folders, the newest complete iteration, and the number of metrics lines."""
    names = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    lines = (run_dir / "metrics.jsonl").read_bytes().count(b"\n")
    listed = ", ".join(re.sub(r"step_0*", "step ", name) for name in names)
    return f"{listed}; whole: {tiny_run.on_disk(run_dir)}; {lines} lines"


def _resumed(printed: str) -> str:
    match = re.search(r"resumed from .*: (\d+) iterations|all \d+ iterations are done", printed)
    if match is None:
        return "from nothing"
    return f"from {match[1]}" if match[1] else "nothing to do"


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table; returns 1 if a kill lost anything."""
    parser = argparse.ArgumentParser("python -m benchmarks.faults.saves", description=__doc__)
    parser.add_argument("--jobs", type=int, default=2, help="number of processes")
    args = parser.parse_args(argv)
    quiet_processes()
    with tempfile.TemporaryDirectory() as folder, Judge() as judge:
        saves = Saves(Harness(Path(folder)), judge)
        kills = kills_of(saves.operations())
        print(HEADER, flush=True)
        bad = 0
        for row in map_at_once(saves.try_kill, kills, args.jobs):
            print(row, flush=True)
            bad += bool(row.problem)
    print(f"\n{len(kills)} kills, {bad} with a loss")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
