"""A run's checkpoints and record in the test's own folder, a clock, and streams."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from tiny_checkpoints import checkpoints_in
from tiny_run import record_in

from rl import progress
from rl.record.checkpoint import Checkpoints
from rl.record.run_record import RunRecord


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return checkpoints_in(tmp_path)


@pytest.fixture
def record(tmp_path: Path) -> RunRecord:
    return record_in(tmp_path)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """clock[0] is the time, in s."""
    now = [100.0]
    for name in ("perf_counter", "monotonic"):
        monkeypatch.setattr(progress.time, name, lambda: now[0])
    return now


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def terminal(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """The stream, which says that it is a terminal."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(stream, "isatty", lambda: True)
    return stream
