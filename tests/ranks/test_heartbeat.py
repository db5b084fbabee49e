"""A rank's heartbeat file when its heartbeat thread and its main thread write at once."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from rl.ranks import heartbeat
from rl.ranks.heartbeat import Call


def test_an_older_phase_never_overwrites_a_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen in CI: the phase of a rank that stopped right after its start remained 'loading'."""
    heart = heartbeat._Heart()
    heart.descriptor = os.open(tmp_path / "beat.json", os.O_WRONLY | os.O_CREAT)
    older, newer = (threading.Thread(target=heart.beat) for _ in range(2))
    has_read, may_write = threading.Event(), threading.Event()

    def calls() -> list[Call]:
        if threading.current_thread() is older:
            has_read.set()
            may_write.wait(60)
        return []

    monkeypatch.setattr(heartbeat, "calls", calls)
    older.start()
    assert has_read.wait(60)
    heart.phases.append(("learn", 1.0))
    newer.start()
    newer.join(0.3)
    may_write.set()
    older.join(60)
    newer.join(60)
    os.close(heart.descriptor)
    beat = heartbeat.read(tmp_path / "beat.json")
    assert beat is not None and beat.phase == "learn"
