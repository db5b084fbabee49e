"""Measures this project and TRL 1.16 with diffusers' pipeline on the same models and completions.

    .venv/bin/python -m pip install -r benchmarks/requirements.txt
    .venv/bin/python -m benchmarks.side_by_side                everything: an hour on one core
    .venv/bin/python -m benchmarks.side_by_side --quick        one round, ten minutes or so

Each setup (TRL with some tuning, or this project) is a process with one thread. The setups run an
iteration each in turn; the first round is dropped. A ratio is the median over rounds, with the
smallest and largest; seconds are CPU seconds, except for waits.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import experiments, report, toy
from benchmarks.toy import Shape

BASE = Shape()
SHAPES = {
    # The ratio of real sizes: 427 : 72 = 1543 : 256 tokens.
    "prompt to completion 6:1 as in real runs (427 to 72 tokens)": Shape(completion_tokens=72),
    "prompt to completion 13:1 (427 to 32 tokens)": BASE,
}
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
MINIMUM = """\
The minimum runs every layer once on every distinct token: a forward of policy and reference and a
backward, without gradients that a LoRA's first layer does not need; the head at predicting
positions, the vision tower once. A count below it is an error. It is the least of such dense
passes: in the last layer, reference and backward could skip the prompt's queries and MLPs, by the
same formulas 8.0% of it at 13:1, 5.5% at 6:1, and 0.9% of a 7B's (28 layers, P = 1543, T = 256),
whose vision tower is not counted."""


def origin() -> str:
    """Facts about machine, packages and measurement, without the host's name."""
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    versions = "; ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    revision = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT
    ).stdout.strip()
    return (
        f"CPU {cpu[1] if cpu else platform.machine()}, {os.cpu_count()} cores, 1 thread a side; "
        f"Python {platform.python_version()}; {versions}. {datetime.datetime.now():%Y-%m-%d %H:%M},"
        f" commit {revision}, load {os.getloadavg()[0]:.1f}."
    )


def written(results: dict[str, Any]) -> str:
    """The whole report, as Markdown."""
    parts = ["# Side by side", LEGEND, results["origin"], MINIMUM]
    for title, record in results["shapes"].items():
        parts += [f"## One group of 8, {title}", report.lead(record), report.head_to_head(record)]
    if "memory" in results:
        parts += ["## Latency", report.latencies(results["latency"])]
        parts += ["## Memory", report.memory(results["memory"])]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Runs the experiments and writes the report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.side_by_side")
    parser.add_argument("--quick", action="store_true", help="one round, and nothing else")
    parser.add_argument("--out", type=Path, default=Path("runs/side_by_side"))
    args = parser.parse_args()
    results: dict[str, Any] = {"origin": origin()}
    with tempfile.TemporaryDirectory(prefix="side-by-side-") as temporary:
        folder = Path(temporary)
        toy.save_models(folder)
        results["shapes"] = {
            title: experiments.head_to_head(folder, shape, 1 if args.quick else 5)
            for title, shape in SHAPES.items()
        }
        if not args.quick:
            results["memory"] = {
                str(group): experiments.memory(folder, replace(BASE, group=group))
                for group in (4, 8, 16)
            }
            results["latency"] = [
                experiments.judge_latency(folder, LATENCY_SHAPE, latency_s, 3)
                for latency_s in LATENCIES_S
            ]
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "side_by_side.json").write_text(json.dumps(results, indent=1) + "\n")
    (args.out / "side_by_side.md").write_text(written(results))
    print(written(results))


if __name__ == "__main__":
    main()
