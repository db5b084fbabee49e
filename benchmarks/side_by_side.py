"""Measures this project and TRL 1.16 with diffusers' pipeline on the same models and completions.

    .venv/bin/python -m pip install -r benchmarks/requirements.txt
    .venv/bin/python -m benchmarks.side_by_side                everything: an hour on one core
    .venv/bin/python -m benchmarks.side_by_side --quick        two shapes, ten minutes or so
    .venv/bin/python -m benchmarks.side_by_side --only latency memory

Each setup (TRL with some tuning, or this project) is a process with one thread. The setups run an
iteration each in turn; the first round is dropped. A ratio is the median over rounds, with the
smallest and largest; seconds are CPU seconds, except for waits. Results in `--out` that are not
measured again are kept.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import math
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import experiments, report, toy
from benchmarks.toy import Shape

BASE = Shape()
SIX_TO_ONE = Shape(completion_tokens=72)
"""Prompt and completion have the ratio of real sizes: 427 : 72 = 1543 : 256 tokens."""
SWEEP = {
    "G = 4": replace(BASE, group=4),
    "G = 8": BASE,
    "G = 16": replace(BASE, group=16),
    "P = 235": replace(BASE, picture_px=224),
    "T = 72": SIX_TO_ONE,
    "T = 8, 16 ... 64": replace(BASE, completion_tokens=64, ragged=True),
}
FULL_TABLES = {
    "T = 72": "prompt to completion 6:1 as in real runs (427 to 72 tokens)",
    "G = 8": "prompt to completion 13:1 (427 to 32 tokens)",
}
EXPERIMENTS = ("sweep", "memory", "latency")
QUICK = ("G = 8", "T = 72")
QUICK_LIMIT_S = 300.0
"""Time limit of each shape's rounds; at least one round is run."""
LATENCY_SHAPE = replace(BASE, group=4, num_groups=2)
LATENCIES_S = (0.0, 0.5, 2.0, 8.0)
ROOT = Path(__file__).parents[1]
PACKAGES = ("torch", "transformers", "peft", "diffusers", "trl", "accelerate")

LEGEND = """\
One iteration of GRPO on a random Qwen2.5-VL (4 layers of width 256, LoRA of rank 32), whose states
condition a random Qwen-Image-Edit (DiT of 2 layers, 4 steps, 128 x 128 px). All setups get the same
samples and fixed completions.

- **TRL stock**: `GRPOTrainer` 1.16 with a reward function as a user first writes it; diffusers' own
  pipeline renders, one picture at a time.
- **TRL tuned**: a group per micro-batch, conditioned in one batch without the head, rendered by
  this project's renderer and judged meanwhile; source latents cached; no checkpointing.
- **TRL + tower**: as tuned; the vision tower caches pictures (`trl_tunings.py`, 15 lines).
- **TRL + prefix**: in addition, completions read their prompt's keys and values in passes without
  gradients: conditioning and reference (one method of the trainer overridden, 60 lines).
- **TRL + prefixes**: in the trained forward, too: the strongest setup that we could build. Its
  first iteration asserts that values and gradients equal those of plain TRL.
- **this project**: `rl.train`, unmodified.

Sampling is transformers' `generate` in every setup. The policy side is preprocessing, conditioning,
log-probs, reference, forward, backward and optimizer step. Ratios are medians over interleaved
rounds (smallest to largest)."""
SWEEP_LEGEND = """\
Where a row does not say otherwise, G = 8 completions of T = 32 tokens follow a prompt of P = 427
(13:1); T = 72 is the shape of real runs (6:1). The minimum runs every layer once on every distinct
token: a forward of policy and reference and a backward, without gradients that a LoRA's first layer
does not need; the head at predicting positions, the vision tower once. A count below it is an
error. It is the least of such dense passes: in the last layer, reference and backward could skip
the prompt's queries and MLPs, by the same formulas 8.0% of it at 13:1, 5.5% at 6:1, and 0.9% of a
7B's (28 layers, P = 1543, T = 256), whose vision tower is not counted."""


def plan(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Experiment -> function that runs it, or shape -> function; in the order of running."""
    rounds, limit_s = args.rounds, QUICK_LIMIT_S if args.quick else math.inf
    shapes = {name: SWEEP[name] for name in QUICK} if args.quick else SWEEP
    return {
        "sweep": {
            name: partial(experiments.head_to_head, folder, shape, rounds, limit_s)
            for name, shape in shapes.items()
        },
        "memory": lambda: {
            str(group): experiments.memory(folder, replace(BASE, group=group))
            for group in (4, 8, 16)
        },
        "latency": lambda: [
            experiments.judge_latency(folder, LATENCY_SHAPE, latency_s, min(rounds, 3))
            for latency_s in LATENCIES_S
        ],
    }


def host() -> dict[str, str]:
    """Facts about the machine and the packages, without the host's name."""
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return {
        "CPU": f"{cpu[1] if cpu else platform.machine()}, {os.cpu_count()} cores, 1 thread a setup",
        "Python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in PACKAGES},
    }


def provenance() -> str:
    """Time, commit, load of the machine and command of a measurement."""
    revision = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT
    ).stdout.strip()
    command = shlex.join(["python", "-m", "benchmarks.side_by_side", *sys.argv[1:]])
    when = f"{datetime.datetime.now():%Y-%m-%d %H:%M}"
    return f"{when}, commit {revision}, load {os.getloadavg()[0]:.1f}, `{command}`"


def written(results: dict[str, Any]) -> str:
    """The whole report, as Markdown."""
    facts = [f"{name} {value}" for name, value in results["host"].items()]
    measured = [f"- {name}: {origin}" for name, origin in results["measured"].items()]
    parts = ["# Side by side", LEGEND, "; ".join(facts) + ".", "\n".join(measured)]
    sections: dict[str, Callable[[Any], str]] = {
        "latency": report.latencies,
        "memory": report.memory,
    }
    if "sweep" in results:
        for name, title in FULL_TABLES.items():
            record = results["sweep"][name]
            parts += [f"## One group of 8, {title}", report.lead(record)]
            parts += [report.head_to_head(record)]
        parts += ["## Sweep", SWEEP_LEGEND, report.sweep(results["sweep"])]
    for name, show in sections.items():
        if name in results:
            parts += [f"## {name.capitalize()}", show(results[name])]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Runs the chosen experiments and writes the report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.side_by_side")
    parser.add_argument("--quick", action="store_true", help="two shapes, nothing else")
    parser.add_argument("--only", nargs="+", choices=EXPERIMENTS, help="these experiments")
    parser.add_argument("--rounds", type=int, default=5, help="after the one that is dropped")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    records = args.out / "side_by_side.json"
    results: dict[str, Any] = {"measured": {}}
    if (args.only or args.quick) and records.exists():
        results = json.loads(records.read_text())
    results["host"] = host()
    with tempfile.TemporaryDirectory(prefix="side-by-side-") as temporary:
        toy.save_models(Path(temporary))
        experiments_by_name = plan(Path(temporary), args)
        for name in args.only or (["sweep"] if args.quick else experiments_by_name):
            if not args.quick:  # which measures only some shapes again
                results.pop(name, None)
                results["measured"].pop(name, None)
            measure = experiments_by_name[name]
            steps = measure if isinstance(measure, dict) else {"": measure}
            for shape, step in steps.items():
                title = f"{name} {shape}".strip()
                results["measured"][title] = provenance()
                print(f"{title}: {results['measured'][title]}", file=sys.stderr, flush=True)
                record = step()
                results[name] = results.get(name, {}) | {shape: record} if shape else record
                records.write_text(json.dumps(results, indent=1) + "\n")
    text = written(results)
    (args.out / "side_by_side.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
