"""Plants faults into the chain from states to weights, and prints by which words a run names them.

    python -m benchmarks.chain_faults [ID ...] [--jobs 2]
    python -m benchmarks.chain_faults --sound 20      runs without a fault; none may raise an alarm

Each fault of `chain_faults.json` is planted alone in a copy of this checkout, which trains for
`ITERATIONS` iterations, with the reference descriptions and without them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.planted_faults import plant
from rl.printing import excerpt

FAULTS = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
SOUND: Mapping[str, Any] = {"id": "sound", "what": "no fault", "edits": []}
ITERATIONS = 4
SHORT = (
    f"num_iterations={ITERATIONS}", "optimizer.warmup_iterations=2", "tracking.page=false",
    "judge.audit=off", f"evaluation.every_n_iterations={ITERATIONS}",
)  # fmt: skip
"""The learning rate peaks in the second iteration, as in a long run after its warm-up."""
EXPECTED = "the user's own words earn no reward under the untrained weights"
"""Begins a warning of a sound run: of quickstart's policy without reference descriptions."""
SHOWN_CHARS = 200


def trial(fault: Mapping[str, Any], overrides: Sequence[str]) -> tuple[str, str]:
    """(when a run with this fault gives its first alarm or stops, or '-'; the words)."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        plant(fault["edits"], folder)
        command = [sys.executable, "-m", "rl.simple_launch", "--nproc", str(fault.get("ranks", 1))]
        done = subprocess.run(
            [*command, "configs/quickstart.jsonnet", *SHORT, *overrides, f"base_exp_dir={folder}"],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": name, "OMP_NUM_THREADS": "1"},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    return first_alarm(done.stdout, done.returncode)


def first_alarm(log: str, code: int) -> tuple[str, str]:
    """(iteration of the first alarm of a run's output, or '-'; its words)."""
    iteration = 0
    lines = log.split("\n")
    for number, line in enumerate(lines):
        if progress := re.match(rf"\[(\d+)/{ITERATIONS}\]", line):
            iteration = int(progress[1])
        if line.startswith("WARNING: ") and EXPECTED not in line:
            return f"{iteration}", line.removeprefix("WARNING: ")
        if line.startswith("this run cannot go on"):
            return f"{iteration}, stops", lines[number + 1].strip()
    return ("-", "") if code == 0 else (f"{iteration}, stops", lines[-2])


def main() -> None:
    parser = argparse.ArgumentParser(description="By which words a run names a broken chain.")
    parser.add_argument("ids", nargs="*")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--sound", type=int, default=0, metavar="N", help="seeds without a fault")
    args = parser.parse_args()
    if args.sound:
        runs = [(SOUND, [f"seed={seed}"]) for seed in range(args.sound)]
    else:
        faults = [fault for fault in FAULTS if not args.ids or fault["id"] in args.ids]
        without = ["evaluation.reference_drift=false"]
        runs = [
            (fault, [*fault.get("overrides", []), *references])
            for fault, references in product(faults, ([], without))
        ]
    print("| fault | overrides | first alarm after iteration | words |\n|---|---|---|---|")
    with ThreadPoolExecutor(args.jobs) as pool:
        trials = pool.map(lambda run: trial(*run), runs)
        for (fault, overrides), (when, words) in zip(runs, trials, strict=True):
            shown = excerpt(words, SHOWN_CHARS).replace("|", "\\|")
            cells = (fault["what"], " ".join(overrides), when, shown)
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
