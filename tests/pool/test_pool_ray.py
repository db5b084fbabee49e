"""Real Ray actors draw what the rank draws, also when one of them is killed, and leave nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rl.pool.ray_cluster import RayWorkers

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_actors_draw_the_ranks_pictures_and_nothing_is_left(tmp_path: Path) -> None:
    """In a process of its own, because vLLM imports Ray, which then has no token."""
    folder = tmp_path / ("long" * 20)  # no socket's path may be so long
    folder.mkdir()
    paths = {"TMPDIR": str(folder), "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    env = {**os.environ, **paths}
    script = [sys.executable, str(ROOT / "tests/pool_session.py"), str(tmp_path / "seen.json")]
    subprocess.run(script, env=env, cwd=tmp_path, check=True, timeout=600)
    found = json.loads((tmp_path / "seen.json").read_text(encoding="utf-8"))
    assert found["equal_after_stop"] and found["restarts_after_stop"] == 0
    assert found["equal"] and found["equal_after_kill"] and found["restarts"] >= 1
    assert found["failures"] == ["no_source: an editor needs a source picture"]
    assert found["listening"] == ["127.0.0.1"]
    assert found["with_key"] == [], "processes of Ray inherit no key of the run"
    assert found["states"] == [RayWorkers.OF_A_RUN] * 2
    assert found["handler_kept"], "Ray replaces the handler of SIGTERM"
    assert "ends with the run" in found["where"] and found["left"] == []
    assert {"pool_workers", "pool_remote_share"} <= set(found["metrics"])
