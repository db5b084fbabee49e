"""Checks in about ten minutes whether this machine's GPUs run everything: `rl check-gpu`.

    rl check-gpu                                      all visible GPUs
    rl check-gpu configs/qwen_image_21.jsonnet        also whether that config's plan fits
    rl check-gpu --tiny                               the same steps on a CPU, in minutes

Each line is PASS, FAIL with a fix, or SKIPPED with the reason. The exit code is 1 after a FAIL. The
report file can be pasted into an issue: it has no host name, no folders and no keys.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rl.check_gpu.gpu_machine import gpus
from rl.check_gpu.gpu_report import Result, recommended, report, verdict
from rl.check_gpu.lines import Asked
from rl.check_gpu.steps import STEPS, Step, run_step
from rl.text import terminal

NO_GPU = (
    "no NVIDIA GPU here ({why}): type `rl check-gpu` on a machine with one, or `rl check-gpu "
    "--tiny` for the same steps on this CPU"
)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code."""
    terminal.guard()
    args = _parse(argv)
    found, why = gpus()
    if not args.tiny and not found:
        print(NO_GPU.format(why=why), file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="check_gpu_") as folder:
        asked = Asked(folder, args.tiny, config=args.config, overrides=args.overrides)
        if not args.tiny:
            smallest_gb = min(gpu.total_gb for gpu in found)
            asked = replace(asked, num_gpus=len(found), gpu_gb=smallest_gb)
        result = check(asked, STEPS)
    keys = recommended(asked, result)
    print(f"\n{verdict(result)}")
    print("\n".join([f"recommended: {key}={value}" for key, value in keys.items()]))
    gpu_names = [gpu.name for gpu in found]
    args.out.write_text(report(asked, result, keys, gpu_names), encoding="utf-8")
    print(f"The report is {args.out}; paste it into an issue if a line is wrong.")
    return 1 if result.failures else 0


def check(asked: Asked, steps: Sequence[Step]) -> Result:
    """Runs the steps and prints each line when its step has ended."""
    result = Result()
    for step in steps:
        if sys.stderr.isatty():
            print(f"... {step.name}", file=sys.stderr, end="\r", flush=True)
        start_s = time.perf_counter()
        for line in run_step(step, asked):
            print(line.text(), flush=True)
            result.lines.append((step.name, line))
        result.seconds[step.name] = time.perf_counter() - start_s
    return result


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("rl check-gpu")
    parser.add_argument("config", nargs="?", default="", help="check its memory plan, too")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of that config")
    parser.add_argument("--tiny", action="store_true", help="on the CPU, with gloo, in minutes")
    parser.add_argument("--out", type=Path, default=Path("check_gpu_report.md"))
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
