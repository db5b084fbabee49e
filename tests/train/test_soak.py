"""A process's memory, descriptors and threads stay constant over three hundred iterations."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from statistics import median

import psutil
import pytest
import tiny_loop

pytestmark = pytest.mark.campaign

NUM_ITERATIONS, WARM = 300, 60
CONFIG = """(import '%s') + {
  run_name: 'tiny', base_exp_dir: '%s', num_iterations: %d,
  prompts_per_iteration: 2, generations_per_prompt: 4,
  sampling+: { max_completion_tokens: 12 },
  evaluation+: { every_n_iterations: 5, num_samples: 4 },
  checkpoint+: { save_every_n_iterations: 2 },
}"""
MAX_GROWTH_MB = 24
"""Growth of resident memory from the first warm iterations to the last; a run takes 800 MB."""


def test_memory_descriptors_and_threads_stay_flat(tmp_path: Path) -> None:
    path = tmp_path / "config.jsonnet"
    shipped = tiny_loop.REPO / "configs/tiny_reasoning.jsonnet"
    path.write_text(CONFIG % (shipped, tmp_path, NUM_ITERATIONS))
    with open(tmp_path / "output.txt", "w+") as output:
        run = subprocess.Popen(
            [sys.executable, str(tiny_loop.HELPERS / "tiny_loop.py"), str(path)],
            env=tiny_loop.environment(),
            cwd=tiny_loop.REPO,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        process, metrics_file = psutil.Process(run.pid), tmp_path / "tiny/metrics.jsonl"
        measurements: list[tuple[float, float, int, int]] = []
        while run.poll() is None:
            time.sleep(0.05)
            with suppress(psutil.NoSuchProcess, FileNotFoundError):
                num_done = metrics_file.read_bytes().count(b"\n") - 1
                rss_mb = process.memory_info().rss / 2**20
                measurements.append((num_done, rss_mb, process.num_fds(), process.num_threads()))
        assert run.returncode == 0, (tmp_path / "output.txt").read_text()[-4000:]
    early = [row for row in measurements if WARM <= row[0] < 2 * WARM]
    late = [row for row in measurements if NUM_ITERATIONS - WARM <= row[0] < NUM_ITERATIONS]
    assert min(len(early), len(late)) > WARM / 2, "too few measurements"
    before, after = (
        [median(column) for column in zip(*rows, strict=True)] for rows in (early, late)
    )
    print(f"iteration, MB, descriptors, threads: early {before}, late {after}")
    assert after[1] - before[1] < MAX_GROWTH_MB
    assert after[2:] == before[2:]
