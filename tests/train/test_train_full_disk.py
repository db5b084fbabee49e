"""A run whose disk is full waits, then continues exactly; SIGTERM still ends it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny_loop
from tiny_disk import fill, mounted
from tiny_loop import assert_same_run, iterations_of
from tiny_waits import wait_for

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("stops_early", [False, pytest.param(True, marks=pytest.mark.campaign)])
def test_a_run_waits_while_the_disk_is_full_and_loses_nothing(
    models: dict[str, str], uninterrupted: Path, tmp_path: Path, stops_early: bool
) -> None:
    path = tiny_loop.write_config(tmp_path, tiny_loop.config_of(models, tmp_path / "disk"))
    log, command = tmp_path / "log", [sys.executable, "-m", "rl.train", str(path)]
    with mounted(tmp_path / "disk", 64 * 1024 * 1024) as disk:
        run_dir = disk / "tiny"
        with log.open("wb") as out, subprocess.Popen(
            command, env=tiny_loop.environment(), cwd=tiny_loop.REPO, stdout=out, stderr=out
        ) as process:  # fmt: skip
            metrics = run_dir / "metrics.jsonl"
            wait_for(lambda: metrics.is_file() and metrics.read_bytes().count(b"\n") >= 2)
            filler = fill(disk)
            wait_for(lambda: b"has no room: " in log.read_bytes())
            assert process.poll() is None
            time.sleep(1)
            if stops_early:
                process.send_signal(signal.SIGTERM)
            else:
                filler.unlink()
            code = process.wait(300)
        output = log.read_text()
        assert "Traceback" not in output
        assert not [name for name in run_dir.rglob("*tmp*") if ".lock" not in name.name]
        if stops_early:
            assert code == 1 and "make room on that disk" in output, output[-3000:]
            filler.unlink()
            tiny_loop.run_forked(path)
        else:
            assert code == 0, output[-3000:]
        assert_same_run(uninterrupted, run_dir)
        assert iterations_of(run_dir) == [0, 1, 2, 3, 4]
