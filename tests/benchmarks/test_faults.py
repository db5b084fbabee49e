"""The fault campaign: its injections take effect, its verdicts are right, a sample of it passes."""

from __future__ import annotations

import importlib
import operator
import os
import re
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_ranks
import torch
from safetensors.torch import save_file

from benchmarks.faults import __main__ as campaign
from benchmarks.faults import saves, trial
from benchmarks.faults.cases import CASES, Case
from benchmarks.faults.inject import EndAt, FileOperation, at_files
from benchmarks.faults.tiny_run import Ended, Judge
from benchmarks.faults.trial import Harness
from rl.files import append_line, fsync

pytestmark = pytest.mark.slow


def test_the_campaign_has_150_distinct_cases_in_five_groups() -> None:
    names = Counter(case.name for case in CASES)
    assert set(names.values()) == {1}, names.most_common(3)
    assert len(names) >= 150
    groups = Counter(case.group for case in CASES)
    assert groups.keys() == {"call", "file", "judge", "row", "damage"}
    assert min(groups.values()) > 40


def test_every_injection_point_exists() -> None:
    injection_points = {c.inject.where for c in CASES if isinstance(c.inject, EndAt)}
    assert len(injection_points) > 15
    for file in Path(campaign.__file__).parent.glob("*.py"):  # those that all cases share
        injection_points |= set(re.findall(r'"(rl\.[\w.]+:[\w.]+)"', file.read_text()))
    for point in injection_points:
        module, _, path = point.partition(":")
        assert callable(operator.attrgetter(path)(importlib.import_module(module))), point


def work_on_files(folder_name: str) -> None:
    folder = Path(folder_name)
    operations: list[FileOperation] = []
    at_files(folder / "watched", operations.append)
    (folder / "watched/new/deep").mkdir(parents=True)
    (folder / "watched/new/a.txt").write_text("a")
    (folder / "watched/new/a.txt").read_text()
    append_line(folder / "watched/b.jsonl", "{}\n")
    save_file({"x": torch.zeros(1)}, folder / "watched/new/deep/x.safetensors")
    torch.save({"x": 1}, folder / "watched/new/deep/x.pt")
    fsync(folder / "watched/new")
    (folder / "watched/new/a.txt").replace(folder / "watched/c.txt")
    (folder / "elsewhere.txt").write_text("not of the run")
    os.truncate(folder / "watched/c.txt", 0)
    shutil.rmtree(folder / "watched/new")
    print(*(f"{operation.name} {operation.path}" for operation in operations), sep="\n")


def test_file_operations_are_seen_also_those_of_native_code(tmp_path: Path) -> None:
    (tmp_path / "watched").mkdir()
    process = tiny_ranks.run_forked(work_on_files, str(tmp_path))
    assert process.returncode == 0, process.stderr
    operations = process.stdout.split("\n")[:-1]
    assert sorted(operations[11:13]) == [  # in the file system's order
        "remove new/deep/x.pt",
        "remove new/deep/x.safetensors",
    ]
    assert operations[:11] + operations[13:] == [
        "mkdir new/deep",  # refused: its parent is missing
        "mkdir new",
        "mkdir new/deep",
        "write new/a.txt",
        "write b.jsonl",  # by `open` and by its opener
        "write b.jsonl",
        "write new/deep/x.safetensors",
        "write new/deep/x.pt",
        "fsync new",
        "rename new/a.txt",
        "truncate c.txt",
        "rmdir new/deep",
        "rmdir new",
    ]


FIRST = Ended(1, "this run cannot go on:\n  the disk is full", 2)
RESUMED = Ended(0, "", 3)
CASE = Case("call", "anywhere", "ENOSPC", save_every=3)


@pytest.mark.parametrize(
    ("first", "resumed", "saved", "case", "verdict"),
    [
        (FIRST, RESUMED, 2, CASE, ""),
        (FIRST, RESUMED, 1, CASE, "LOST"),
        (replace(FIRST, code=-9), RESUMED, 0, CASE, ""),
        (replace(FIRST, code=-9), RESUMED, 0, replace(CASE, save_every=1), "LOST"),
        (FIRST, replace(RESUMED, code=1), 2, CASE, "LOST"),
        (replace(FIRST, code=None), RESUMED, 2, CASE, "HUNG"),
        (FIRST, replace(RESUMED, code=None), 2, CASE, "HUNG"),
        (replace(FIRST, printed="exit"), RESUMED, 2, CASE, "UNCLEAR"),
        (
            replace(FIRST, printed="Traceback (most recent call last):\nthis run cannot go on"),
            RESUMED,
            2,
            CASE,
            "UNCLEAR",
        ),
        (FIRST, RESUMED, 2, replace(CASE, says="step_000002 is damaged"), "SILENT"),
        (replace(FIRST, code=0), None, 2, replace(CASE, cannot_resume=True), "SILENT"),
    ],
)
def test_each_outcome_gets_its_verdict(
    first: Ended, resumed: Ended | None, saved: int, case: Case, verdict: str
) -> None:
    assert trial.bad_verdict(case, first, resumed, saved, is_done=False)[0] == verdict


def case_named(name: str) -> Case:
    [case] = [case for case in CASES if case.name == name]
    return case


SEAL = "fsync checkpoints/.tmp-step_000003/manifest.json"
"""The operation after the manifest was written."""


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Harness:
    return Harness(tmp_path_factory.mktemp("faults"))


def test_a_sample_of_the_campaign(harness: Harness) -> None:
    """`python -m benchmarks.faults` tries every case."""
    outcome = trial.try_case(harness, 0, case_named("call | the engine is synced | ENOSPC"))
    assert outcome.verdict == "stopped" and "No space left on device" in outcome.why, outcome


def test_a_kill_in_the_middle_of_a_save(harness: Harness) -> None:
    """`python -m benchmarks.faults.saves` tries every operation."""
    with Judge() as judge:
        row = saves.Saves(harness, judge).try_kill(saves.Kill(0, "half", SEAL))
    assert not row.problem, row
    assert row.operation == SEAL and ".tmp-step 3" in row.disk, row
    assert row.resumed == "from 2"


@pytest.mark.campaign
def test_kill_9_at_every_file_operation_of_a_save_costs_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = saves.main([])
    printed = capsys.readouterr().out
    assert code == 0, printed
    operations = {line.split("|")[2].split()[0] for line in printed.split("\n") if "step" in line}
    assert operations >= {"mkdir", "write", "fsync", "rename", "remove", "rmdir"}, printed


@pytest.mark.campaign
def test_a_larger_sample_of_the_campaign(capsys: pytest.CaptureFixture[str]) -> None:
    assert campaign.main(["--sample", "40"]) == 0, capsys.readouterr().out
