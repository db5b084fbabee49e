"""Where one iteration of a run goes: seconds per phase, and the functions that take them.

    python -m benchmarks.profile_iteration configs/quickstart.jsonnet --out after.json
    python -m benchmarks.profile_iteration --show before.json after.json

What: runs `rl.train` itself for a few iterations, without evaluation and checkpoints; the first is
dropped, the last runs under cProfile (so only its functions are read, not its seconds). What not:
any part of the loop. To profile an older commit, start it in a worktree of that commit with this
one on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.meter import Meter

NUM_FUNCTIONS = 14
"""Shown, by their own seconds."""


class IterationProfiler:
    """Called at the end of every iteration of the run, by way of `Run.log`."""

    def __init__(self, num_measured: int) -> None:
        self._num_measured = num_measured
        self._meter = Meter(time.process_time)
        self._profiler = cProfile.Profile()
        self._num_seen = 0
        self.iterations: list[dict[str, tuple[float, float]]] = []
        """Phase -> (wall s, CPU s), one entry per measured iteration."""
        self.functions: list[tuple[str, int, float]] = []
        """(function, calls, own s) of the profiled iteration."""

    def attach(self) -> None:
        """Watch every run that is opened in this process."""
        from rl.run.run import Run

        log, seen = Run.log, self.iteration_ends

        def logged(run: Run, done: int, metrics: Any) -> None:
            log(run, done, metrics)
            if done:
                seen()

        setattr(Run, "log", logged)  # noqa: B010 (mypy sees no method replaced)
        self._meter.watch_phases()

    def iteration_ends(self) -> None:
        """The first is warm-up; after the measured ones comes the profiled one."""
        self._num_seen += 1
        if 1 < self._num_seen <= 1 + self._num_measured:
            spent = self._meter.read()
            self.iterations.append({k: (s.wall_s, s.cpu_s) for k, s in spent.items()})
        if self._num_seen == 1 + self._num_measured:
            self._profiler.enable()
        if self._num_seen == 2 + self._num_measured:
            self._profiler.disable()
            self.functions = _top_functions(self._profiler)
        self._meter.reset()


def _top_functions(profiler: cProfile.Profile) -> list[tuple[str, int, float]]:
    rows = [
        (_short(file, line, name), calls, own_s)
        for (file, line, name), (_, calls, own_s, _, _) in pstats.Stats(profiler).stats.items()  # type: ignore[attr-defined]
    ]
    return sorted(rows, key=lambda row: -row[2])[:NUM_FUNCTIONS]


def _short(file: str, line: int, name: str) -> str:
    if line == 0:
        return name.strip("<>").replace("built-in method ", "")
    parts = Path(file).parts
    packages = [i for i, part in enumerate(parts) if part in ("site-packages", "rl")]
    kept = parts[packages[-1] :] if packages else parts[-1:]
    return f"{'/'.join(kept).removeprefix('site-packages/')}:{name}"


def profile(config: str, overrides: list[str], num_measured: int) -> dict[str, Any]:
    """Run it; medians over the measured iterations."""
    import torch

    from rl import train

    profiler = IterationProfiler(num_measured)
    profiler.attach()
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "num_iterations": num_measured + 2,
            "base_exp_dir": f"'{folder}'",
            "evaluation.every_n_iterations": 0,
            "checkpoint.save_every_n_iterations": 10**6,
        }
        asked = [f"{key}={value}" for key, value in settings.items()]
        train.main([config, *asked, *overrides])
    phases = sorted({phase for iteration in profiler.iterations for phase in iteration})
    medians = {
        phase: [
            statistics.median(
                iteration.get(phase, (0.0, 0.0))[i] for iteration in profiler.iterations
            )
            for i in range(2)
        ]
        for phase in phases
    }
    return {
        "config": config,
        "overrides": overrides,
        "threads": torch.get_num_threads(),
        "num_measured": num_measured,
        "phases": medians,
        "functions": profiler.functions,
    }


def show(profiles: dict[str, dict[str, Any]]) -> str:
    """Markdown: phases of all profiles beside each other, then each one's functions."""
    names = list(profiles)
    any_profile = profiles[names[0]]
    head = f"{any_profile['config']}, {any_profile['threads']} thread(s), median of "
    lines = [f"{head}{any_profile['num_measured']} iterations: wall s (CPU s)", ""]
    lines += [f"| phase | {' | '.join(names)} |", "| --- |" + " ---: |" * len(names)]
    phases = {phase for p in profiles.values() for phase in p["phases"]}

    def total(phase: str) -> float:
        return max(p["phases"].get(phase, (0, 0))[0] for p in profiles.values())

    for phase in [*sorted(phases, key=total, reverse=True), "all"]:
        cells = []
        for p in profiles.values():
            if phase == "all":
                wall_s, cpu_s = (sum(v[i] for v in p["phases"].values()) for i in range(2))
            else:
                wall_s, cpu_s = p["phases"].get(phase, (0.0, 0.0))
            cells.append(f"{wall_s:.3f} ({cpu_s:.3f})")
        lines.append(f"| {phase} | {' | '.join(cells)} |")
    for name, p in profiles.items():
        lines += ["", f"Functions of {name}, by their own seconds under cProfile:", ""]
        lines += ["| own s | calls | function |", "| ---: | ---: | --- |"]
        lines += [f"| {own_s:.3f} | {calls} | `{what}` |" for what, calls, own_s in p["functions"]]
    return "\n".join(lines)


def main() -> None:
    """See the file's docstring."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profile_iteration")
    parser.add_argument("config", nargs="?", default="configs/quickstart.jsonnet")
    parser.add_argument("overrides", nargs="*", help="key=value, as for rl.train")
    parser.add_argument("--iterations", type=int, default=3, help="measured ones")
    parser.add_argument("--threads", type=int, help="of torch; default: its own choice")
    parser.add_argument("--out", type=Path, help="JSON file for --show")
    parser.add_argument("--show", nargs="+", type=Path, help="files to set beside each other")
    asked = parser.parse_intermixed_args()
    if asked.show:
        print(show({file.stem: json.loads(file.read_text()) for file in asked.show}))
        return
    if asked.threads:
        os.environ["OMP_NUM_THREADS"] = str(asked.threads)
    result = profile(asked.config, asked.overrides, asked.iterations)
    if asked.out:
        asked.out.write_text(json.dumps(result, indent=1) + "\n")
    print(show({"this run": result}), file=sys.stdout, flush=True)


if __name__ == "__main__":
    main()
