"""A run whose disk fills waits and is then the run that it would have been; and ends when told."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_loop
from tiny_disk import fill, mounted
from tiny_loop import assert_same_run, metrics_of

pytestmark = pytest.mark.slow

SIZE = 64 * 1024 * 1024


def wait_for(what: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    end_s = time.monotonic() + 300
    while not what():
        assert process.poll() is None and time.monotonic() < end_s, "it ended, or hangs"
        time.sleep(0.02)


@pytest.mark.parametrize("is_told_to_stop", [False, True])
def test_a_full_disk_costs_nothing(
    models: dict[str, str], straight: Path, tmp_path: Path, is_told_to_stop: bool
) -> None:
    path = tiny_loop.write_config(tmp_path, tiny_loop.config_of(models, tmp_path / "disk"))
    log = tmp_path / "log"
    command = [sys.executable, "-m", "rl.train", str(path)]
    with mounted(tmp_path / "disk", SIZE) as disk:
        run_dir = disk / "tiny"
        with log.open("wb") as out, subprocess.Popen(
            command, env=tiny_loop.environment(), cwd=tiny_loop.REPO, stdout=out, stderr=out
        ) as process:  # fmt: skip
            lines = run_dir / "metrics.jsonl"
            wait_for(lambda: lines.is_file() and lines.read_bytes().count(b"\n") >= 2, process)
            hog = fill(disk)
            wait_for(lambda: b"is full: " in log.read_bytes(), process)
            time.sleep(1)
            if is_told_to_stop:
                process.send_signal(signal.SIGTERM)
            else:
                hog.unlink()
            code = process.wait(300)
        said = log.read_text()
        assert "Traceback" not in said
        assert not [name for name in run_dir.rglob("*tmp*") if ".lock" not in name.name]
        if is_told_to_stop:
            assert code == 1 and "make room on that disk" in said, said[-3000:]
            hog.unlink()
            tiny_loop.run_forked(path)
        else:
            assert code == 0 and "there is room again after" in said, said[-3000:]
        assert_same_run(straight, run_dir)
        assert [row["iteration"] for row in metrics_of(run_dir)] == [0, 1, 2, 3, 4]
