"""Atomic writes: the leftover of a kill, and rows nested too deeply."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rl.files import MAX_NESTING, row_of, write_atomically


def test_the_leftover_of_a_kill_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / ".file.tmp").write_text("half of something longer")
    write_atomically(tmp_path / "file", "whole")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"file": "whole"}


@pytest.mark.parametrize("levels", [MAX_NESTING + 1, 900, 100_000])
def test_a_row_that_is_nested_too_deeply_is_refused(levels: int) -> None:
    """Code that walks such a row recursively would fail, as the report page's settings did."""
    deep = b'{"a":' * levels + b"1" + b"}" * levels
    assert row_of(deep) is None
    assert row_of(b'{"a":' * MAX_NESTING + b"1" + b"}" * MAX_NESTING) is not None
    assert row_of(json.dumps({"many": [[1]] * 1000}).encode()) == {"many": [[1]] * 1000}
