"""Tries a case: starts a run with its fault, starts it again without, and judges the outcome.

`Harness` makes the campaign's base runs: an uninterrupted one, and one stopped after two.
"""

from __future__ import annotations

import shutil
import signal
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks.faults import tiny_run
from benchmarks.faults.cases import Case
from benchmarks.faults.inject import EndAt
from benchmarks.faults.tiny_run import Ended, Judge
from tests.helpers.tiny_faulty_judge import Fault

BAD = ("LOST", "SILENT", "HUNG", "UNCLEAR", "NOT TRIED")
GOOD = ("survived", "stopped")
_REASONS = ("cannot go on", "cannot run", "will save and leave", "stopped after", "could not be")
"""Texts of clear messages: a run that ends early must print one of them."""
_RECORD_REASONS = ("could not be written", "metrics.jsonl", "which nothing makes again")
"""Texts of messages about damaged or lost lines of metrics or episodes."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case."""

    verdict: str
    """One of `GOOD` or `BAD`."""
    why: str
    """The problem if the verdict is bad, else the main line that the first start printed."""


class Harness:
    """Trains both runs in `folder`, in a few seconds. The caller deletes the folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows = tiny_run.write_rows(folder / "data")
        with Judge() as judge:
            self.uninterrupted = tiny_run.prepare(folder / "uninterrupted", self.rows, judge)
            ended = tiny_run.start(folder / "uninterrupted")
            assert ended.code == 0, ended.printed[-2000:]
            stopped = tiny_run.prepare(folder / "stopped", self.rows, judge)
            # An error, not kill -9, because the process must first save the second iteration.
            step = "rl.learner.train_step:TrainStep.step"
            tiny_run.start(stopped.parent, EndAt(step, 3, "RuntimeError"))
        assert tiny_run.on_disk(stopped) == 2, "the run did not end in its third iteration"
        self._stopped = stopped

    def copy_stopped(self, name: str) -> Path:
        """Copies the stopped run; returns the folder of the copy, which has no config yet."""
        folder = self.folder / name
        shutil.copytree(self._stopped, folder / tiny_run.RUN)
        return folder


def try_case(harness: Harness, number: int, case: Case) -> Outcome:
    """Tries a case in a temporary folder."""
    folder = harness.folder / f"case-{number}"
    run_dir = folder / tiny_run.RUN
    if case.damage is not None:
        harness.copy_stopped(folder.name)
        case.damage(run_dir)
    rows = harness.rows
    if case.rows is not None:
        rows = Path(shutil.copytree(rows.parent, folder / "data")) / rows.name
        case.rows(rows)
    with Judge() as judge:
        _break(judge, case)
        tiny_run.prepare(
            folder,
            rows,
            judge,
            checkpoint={"save_every_n_iterations": case.save_every},
            data={
                "train": [{"type": "edit_jsonl", "path": str(rows)}],
                "on_bad_row": case.on_bad_row,
            },
        )
        first = tiny_run.start(folder, case.inject)
        saved = _saved(run_dir)
        is_done = first.code == 0 and saved == tiny_run.NUM_ITERATIONS
        _fix(judge, harness, rows)
        again = None if is_done or case.cannot_resume else tiny_run.start(folder)
    verdict, why = bad_verdict(case, first, again, saved, is_done)
    if not verdict and not case.cannot_resume and not case.results_differ:
        verdict, why = _compared(case, harness.uninterrupted, run_dir, first, again)
    if not verdict:
        verdict, why = "survived" if is_done else "stopped", _main_line(first.printed)
    shutil.rmtree(folder)
    return Outcome(verdict, why)


def _break(judge: Judge, case: Case) -> None:
    if case.judge is None:
        return
    if case.judge.from_request == 0:
        judge.models = case.judge.fault
        return
    judge.faults = [Fault()] * (case.judge.from_request - 1) + [case.judge.fault]
    if case.judge.times == 0:
        judge.after = case.judge.fault


def _fix(judge: Judge, harness: Harness, rows: Path) -> None:
    judge.faults, judge.after, judge.models = [], Fault(), None
    if rows != harness.rows:
        shutil.rmtree(rows.parent)
        shutil.copytree(harness.rows.parent, rows.parent)


def bad_verdict(
    case: Case, first: Ended, again: Ended | None, saved: int, is_done: bool
) -> tuple[str, str]:
    """A bad verdict and its reason, or ('', ''). `saved`: iterations in the newest checkpoint after
    the first start; `is_done`: the first start finished the run."""
    if first.code is None or (again is not None and again.code is None):
        return "HUNG", (first if first.code is None else again or first).printed[-300:]
    if case.results_differ and not is_done:
        return "LOST", f"the run did not go on without the broken part: {_main_line(first.printed)}"
    # A killed run may lose the iteration that is being saved, and those since the last due save.
    killed = first.code == -signal.SIGKILL
    due = (first.finished - 1) // case.save_every * case.save_every if killed else first.finished
    if case.can_save and case.damage is None and saved < due:
        return "LOST", f"{first.finished} finished, {saved} on disk: {_main_line(first.printed)}"
    if again is not None and again.code != 0:
        return "LOST", f"the second start ended with {again.code}: {again.printed[-300:]}"
    if "Traceback (most recent call last)" in first.printed and not case.is_bug:
        return "UNCLEAR", _main_line(first.printed)
    explains = is_done or killed or case.is_bug or any(e in first.printed for e in _REASONS)
    if not explains and case.kind != "the console is gone":
        return "UNCLEAR", f"exit code {first.code}: {first.printed[-300:]}"
    if case.says not in first.printed.lower():
        return "SILENT", f"not printed: {case.says}: {_main_line(first.printed)}"
    if case.cannot_resume and first.code == 0:
        return "SILENT", "the run was not refused"
    return "", ""


def _compared(
    case: Case, uninterrupted: Path, run_dir: Path, first: Ended, again: Ended | None
) -> tuple[str, str]:
    printed = first.printed + (again.printed if again else "")
    explains = case.changes_record and any(part in printed for part in _RECORD_REASONS)
    different = tiny_run.difference(uninterrupted, run_dir, weights_only=case.adds_to_record)
    if different and explains:
        different = tiny_run.difference(uninterrupted, run_dir, weights_only=True)
    if not different:
        return "", ""
    return ("LOST" if first.code else "SILENT"), f"differs from the uninterrupted run: {different}"


def _saved(run_dir: Path) -> int:
    with suppress(OSError, ValueError):
        return tiny_run.on_disk(run_dir)
    return 0


def _main_line(printed: str) -> str:
    """The most informative line: the last reason, else the last warning, else the last line."""
    lines = [line.strip() for line in printed.split("\n") if line.strip()]
    reasons = [after for line, after in pairwise(lines) if line.startswith("this run cannot")]
    warnings = [line for line in lines if line.startswith("WARNING") or "stopped after" in line]
    return (reasons or warnings or lines or [""])[-1][:300]
