"""Measures this project's speed and memory on one GPU at real size, with random weights, offline.

    rl bench-gpu                                all items, each for 60 s
    rl bench-gpu --items 4b,4                   some of them, see `ITEMS`
    rl bench-gpu --items 5 --seconds-per-item 400
    rl bench-gpu --tiny                         in seconds on a CPU

Writes the measurements and the project's goals to `--out`. The exit code is 1
if an item failed or a result is wrong. "floor" is the time of the same FLOPs at
the rate of item 1's matrix products.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import importlib.metadata
import json
import platform
import re
import shlex
import sys
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rl.text import command_line

if TYPE_CHECKING:
    from benchmarks.gpu_bench import Bench

ITEMS = {
    "1": ("gpu_check", "matmul_rate", "the rate of matrix products"),
    "4b": ("gpu_check", "packed_attention", "packed attention against a dense mask"),
    "2": ("gpu_render", "transformer_forwards", "the editor's transformer"),
    "3": ("gpu_render", "vae", "the editor's VAE"),
    "4": ("gpu_policy", "one_group", "the policy's passes over a group"),
    "6": ("gpu_policy", "weight_sync", "the export of the adapter"),
    "5": ("gpu_iteration", "iterations", "whole iterations without sampling"),
    "7": ("gpu_iteration", "vllm_engine", "vLLM beside all other models"),
}
"""Item -> (module, function, title), in the order in which they run. A module is imported only for
its items, so that a missing package makes only these fail."""
PACKAGES = ("torch", "triton", "transformers", "peft", "diffusers", "vllm")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the items and returns the exit code."""
    args = _parse(argv)
    bench = open_bench(args)
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as folder:
        bench.folder = Path(folder)
        for item in args.items:
            run_item(bench, item)
    text = written(bench, argv)
    print(text)
    if args.out is not None:
        save(bench, text, args, argv)
    return 1 if bench.report.failures else 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line.Parser("rl bench-gpu", __doc__)
    parser.add_argument("--items", default=",".join(ITEMS), help="some of " + ", ".join(ITEMS))
    parser.add_argument("--tiny", action="store_true", help="tiny sizes; runs on a CPU, too")
    parser.add_argument("--seconds-per-item", type=float, default=None, help="60; tiny: 0")
    parser.add_argument("--out", type=Path, help="benchmarks/results; tiny: nothing is written")
    args = parser.parse_args(argv)
    items = args.items.split(",")
    unknown = sorted(set(items) - set(ITEMS))
    if unknown:
        parser.error(f"--items: no item {', '.join(unknown)}; there are {', '.join(ITEMS)}")
    args.items = [item for item in ITEMS if item in items]
    if args.seconds_per_item is None:
        args.seconds_per_item = 0.0 if args.tiny else 60.0
    if args.out is None and not args.tiny:
        args.out = Path(__file__).parent / "results"
    return args


def open_bench(args: argparse.Namespace) -> Bench:
    """A `Bench` on the GPU, or on the CPU without one; exits if real sizes need a GPU."""
    from benchmarks.gpu_bench import Bench, Report
    from benchmarks.gpu_models import REAL, TINY
    from rl.ranks.dist import Dist

    dist = Dist.from_env()
    if not args.tiny and not dist.device.startswith("cuda"):
        sys.exit("this needs a CUDA device; --tiny runs the same code at tiny sizes on a CPU")
    size = TINY if args.tiny else REAL
    return Bench(dist, size, args.seconds_per_item, Path(), Report())


def run_item(bench: Bench, item: str) -> None:
    """Runs an item. An error is reported as a failure, so that the other items still run."""
    from benchmarks.gpu_bench import first_line, free
    from benchmarks.gpu_models import save_policy_files

    part, name, title = ITEMS[item]
    print(f"== {item}: {title}", file=sys.stderr, flush=True)
    bench.item, failed = item, ""
    try:
        if not (bench.folder / "policy").exists():
            save_policy_files(bench)
        getattr(importlib.import_module(f"benchmarks.{part}"), name)(bench)
    except Exception as error:
        traceback.print_exc()
        failed = f"{item}: {first_line(error)}"
    if failed:
        bench.report.fail(failed)
    free(bench.device)


def host(bench: Bench, argv: Sequence[str] | None) -> dict[str, str]:
    """Facts about the machine and the packages, without the host's name."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    arguments = sys.argv[1:] if argv is None else argv
    command = re.sub(r" --out[ =]\S+", "", shlex.join(["rl", "bench-gpu", *arguments]))
    return {
        "date": f"{datetime.date.today():%Y-%m-%d}",
        "device": device_name(bench.device),
        "dtype": bench.dtype,
        "Python": platform.python_version(),
        **versions,
        "command": command,
    }


def device_name(device: str) -> str:
    """'NVIDIA H200', or 'CPU'."""
    if not device.startswith("cuda"):
        return "CPU"
    import torch

    return torch.cuda.get_device_name(device)


def written(bench: Bench, argv: Sequence[str] | None) -> str:
    """The whole report as Markdown."""
    report = bench.report
    facts = "\n".join(f"- {name}: {value}" for name, value in host(bench, argv).items())
    parts = [f"# One device, {bench.size.name} size", facts]
    parts += ["## Times", report.line_table()]
    if report.goals:
        parts += ["## Goals, of real sizes", report.goal_table()]
    if report.failures:
        parts += ["## Failed", "\n".join(f"- FAIL {text}" for text in report.failures)]
    return "\n\n".join(parts) + "\n"


def save(bench: Bench, text: str, args: argparse.Namespace, argv: Sequence[str] | None) -> None:
    """Writes `gpu_<device>_<date>[_items_<items>].md` and `.json`, which has all digits."""
    facts = host(bench, argv)
    device = re.sub(r"\W+", "-", facts["device"]).lower()
    items = "" if args.items == list(ITEMS) else "_items_" + "-".join(args.items)
    args.out.mkdir(parents=True, exist_ok=True)
    stem = args.out / f"gpu_{device}_{facts['date']}{items}"
    stem.with_suffix(".md").write_text(text)
    report = bench.report
    record = {
        "host": facts,
        "lines": [{**asdict(line), "floor_share": line.floor_share} for line in report.lines],
        "goals": [asdict(goal) for goal in report.goals],
        "failures": report.failures,
    }
    stem.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
