"""The planted faults of the chain still fit the code; a run's first alarm is found in its log."""

from __future__ import annotations

import pytest

from benchmarks.chain_faults import EXPECTED, FAULTS, first_alarm
from benchmarks.planted_faults import ROOT


def test_every_fault_can_be_planted() -> None:
    edits = [edit for fault in FAULTS for edit in fault["edits"]]
    texts = [(ROOT / edit["file"]).read_text("utf-8") for edit in edits]
    assert [text.count(edit["old"]) for edit, text in zip(edits, texts, strict=True)] == [
        1 for _ in edits
    ]


@pytest.mark.parametrize(
    ("log", "code", "found"),
    [
        (f"WARNING: {EXPECTED}: ...\n[4/4]  reward 0.3\nend", 0, ("-", "")),
        ("[1/4]  a\n[2/4]  b\nWARNING: learning\nWARNING: more\n[3/4]", 0, ("2", "learning")),
        ("[1/4]  a\nthis run cannot go on:\n  the sync\n", 1, ("1, stops", "the sync")),
        ("[2/4]  a\nKilled\n", 137, ("2, stops", "Killed")),
    ],
)
def test_the_first_alarm_of_a_log(log: str, code: int, found: tuple[str, str]) -> None:
    assert first_alarm(log, code) == found
