"""Limits the lines of code; to raise a limit, edit `budget.json` and explain it in CHANGELOG."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LINES = json.loads((ROOT / "tests/budget.json").read_text(encoding="utf-8"))["lines"]


@pytest.mark.parametrize("folder", LINES)
def test_lines_are_within_their_budget(folder: str) -> None:
    lines = sum(file.read_bytes().count(b"\n") for file in (ROOT / folder).rglob("*.py"))
    print(f"\n{folder}/: {lines} lines")
    assert lines <= LINES[folder]
