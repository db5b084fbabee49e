"""Three hundred iterations with many saves and held-out runs: what a process holds stays flat."""

from __future__ import annotations

import subprocess
import sys
import time
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
"""Of resident memory from the first warm iterations to the last; what a run holds is 800."""


def test_memory_descriptors_and_threads_stay_flat(tmp_path: Path) -> None:
    path = tmp_path / "config.jsonnet"
    shipped = tiny_loop.REPO / "configs/tiny_reasoning.jsonnet"
    path.write_text(CONFIG % (shipped, tmp_path, NUM_ITERATIONS))
    with open(tmp_path / "output.txt", "w+") as output:
        run = subprocess.Popen(
            [sys.executable, str(tiny_loop.TESTS / "tiny_loop.py"), str(path)],
            env=tiny_loop.environment(),
            cwd=tiny_loop.REPO,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        seen = looked_at(psutil.Process(run.pid), tmp_path / "tiny/metrics.jsonl")
        assert run.wait() == 0, (tmp_path / "output.txt").read_text()[-4000:]
    early, late = seen[:WARM], seen[-WARM:]
    for name, values in (("early", early), ("late", late)):
        rss_mb, descriptors, threads = (median(column) for column in zip(*values, strict=True))
        print(f"{name}: {rss_mb:.1f} MB, {descriptors:g} descriptors, {threads:g} threads")
    grown = [
        median(now) - median(then)
        for then, now in zip(zip(*early, strict=True), zip(*late, strict=True), strict=True)
    ]
    assert grown[0] < MAX_GROWTH_MB
    assert grown[1:] == [0, 0]


def looked_at(process: psutil.Process, lines: Path) -> list[tuple[float, int, int]]:
    """Resident MB, descriptors and threads after each iteration that was seen, the first `WARM`
    left out."""
    seen: dict[int, tuple[float, int, int]] = {}
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.05)
        if not lines.is_file():
            continue
        done = lines.read_bytes().count(b"\n") - 1
        if done >= WARM and done not in seen and done < NUM_ITERATIONS:
            seen[done] = (
                process.memory_info().rss / 2**20,
                process.num_fds(),
                process.num_threads(),
            )
    assert len(seen) > NUM_ITERATIONS / 2, f"it ended early, or was looked at too seldom: {seen}"
    return [seen[done] for done in sorted(seen)]
