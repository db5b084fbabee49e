"""Real Ray actors draw what the rank draws, also when some are killed, and leave nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_loop import HELPERS, environment
from tiny_messages import holds


@pytest.mark.slow
def test_actors_draw_the_ranks_pictures_and_nothing_is_left(tmp_path: Path) -> None:
    """In a process of its own, so that it sees what is left of its children."""
    command = [sys.executable, HELPERS / "pool_session.py", tmp_path / "seen.json"]
    subprocess.run(command, env=environment(), cwd=tmp_path, check=True, timeout=900)
    found = json.loads((tmp_path / "seen.json").read_text(encoding="utf-8"))
    assert found["equal"] and found["failures"] == ["no_source: an editor needs a source picture"]
    for number in (1, 2):
        assert found[f"equal_after_kill_{number}"] and found[f"lost_{number}"] == number
    assert found["equal_at_the_end"] and found["workers"] == 2
    assert found["with_key"] == [], "workers and the process beside the rank get no key of the run"
    assert found["handler_kept"], "Ray replaces the handler of SIGTERM"
    assert holds(found["after_raylet"], "raylet ... has ended ... same command")
    assert "the Ray cluster at " in found["where"] and found["left"] == []
    assert {"pool_workers", "pool_restarts"} <= set(found["metrics"])
