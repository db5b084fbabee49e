"""Runs steps that prove a machine, each in a process of its own, and prints their lines."""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import math
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path

import psutil

from rl import printing
from rl.check.this_machine import gpus, installed
from rl.config.loading import nearest
from rl.config.schema import load_config
from rl.files import append_line, fsync, json_line, read_rows
from rl.printing import Parser, folded, scrub, show
from rl.ranks import signals

# ---- lines ---------------------------------------------------------------------------------------
# One line of a step's results, and what each step gets.

NEEDS_CUDA = "needs a GPU (CUDA)"
_FOLDERS = re.compile(r"(?<![\w/:])(?:~|\.{1,2})?(?:/(?!dev/shm|proc/)[\w.@+~-]+)+/")


@dataclass(frozen=True)
class Line:
    """The result of one check, or one measurement."""

    status: str
    """PASS, FAIL, SKIPPED, NO TIME (the deadline came first) or MEASURED (a number without limit).
    """
    what: str
    note: str = ""
    fix: str = ""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Config key -> the value that this result recommends."""
    data: Mapping[str, float] = field(default_factory=dict)
    """Numbers of a measurement, all digits."""

    def text(self) -> str:
        """At most 80 columns."""
        note = f": {self.note}" if self.note else ""
        text = folded(f"{self.status:<8} {self.what}{note}", indent=9)
        return f"{text}\n{folded(f'fix: {self.fix}', ' ' * 9, 14)}" if self.fix else text


def result(
    what: str, good: bool, note: str = "", fix: str = "", keys: Mapping[str, str] | None = None
) -> Line:
    """PASS if `good`; else FAIL with the fix, and the keys that avoid it."""
    return Line("PASS", what, note) if good else Line("FAIL", what, note, fix, keys or {})


def skipped(what: str, why: str = NEEDS_CUDA) -> Line:
    return Line("SKIPPED", what, why)


def measured(what: str, note: str, **data: float) -> Line:
    return Line("MEASURED", what, note, data=data)


def shareable(text: str) -> str:
    """`text` without keys, this machine's name, and the folders of paths."""
    name = platform.node()
    text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", "<host>", scrub(text)) if name else text
    return _FOLDERS.sub("", text)


@dataclass(frozen=True)
class Setup:
    """What a step gets, as JSON."""

    folder: str
    """Temporary, for runs and logs."""
    out: str
    """The folder of the results."""
    tiny: bool = False
    """On the CPU: gloo, eager mode, tiny sizes."""
    num_gpus: int = 0
    gpu_gb: float = 0.0
    """Of the smallest GPU."""
    config: str = ""
    overrides: Sequence[str] = ()

    @property
    def device(self) -> str:
        return "cpu" if self.tiny else "cuda:0"

    @property
    def dtype(self) -> str:
        return "float32" if self.tiny else "bfloat16"

    def words(self, name: str, *more: str) -> list[str]:
        """The shipped small config `name`, and overrides that put it on this device."""
        path = f"configs/{name}.jsonnet"
        words = [f"base_exp_dir={self.folder}/runs"]
        if load_config(path).renderer["type"] != "none":
            words += ["renderer.batch_size=8"]
            words += [] if self.tiny else ["renderer.dtype=bfloat16"]
        if not self.tiny:
            words += ["policy.device=auto", "policy.dtype=bfloat16", "engine.type=vllm"]
            words.append(f"gpu_gb={int(self.gpu_gb)}")
        return [path, *words, *more]


# ---- steps ---------------------------------------------------------------------------------------
# Runs steps in child processes, small ones side by side, each with a limit, all by a deadline.
#
# The child is `python -m rl.tools.gpu_checks <step's name> <module:function> <Setup as JSON> ...`.
# It appends each `Line` to `results.jsonl` at once, so that no later death loses it.

RESULTS = "results.jsonl"
SMALL_GB = 4.0
"""GPU memory for a step that does not run alone, with its CUDA context."""
MIN_START_S = 20.0
"""A step that has less time than this, and than its limit, is not started."""
ON_CPU = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
"""Environment of a step under `--tiny`."""
LARGE_GPU_GB = 78.0
"""An "80 GB" GPU has at least so many."""


@dataclass(frozen=True)
class Step:
    name: str
    function: str
    """`module:function`, called with a `Setup` and `arguments`, yields `Line`s."""
    limit_s: float
    arguments: tuple[str, ...] = ()
    is_alone: bool = False
    """Whether nothing else may run meanwhile on a GPU: it measures, or needs more memory."""
    needs_large_gpu: bool = False
    needs_gpu: bool = False
    package: str = ""
    """A package without which the step fails at once."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Config keys that avoid what failed here."""


FIXES = {
    r"out of memory": "end other processes on the GPU (nvidia-smi), or use a larger GPU",
    r"No module named|PackageNotFound": "install requirements.lock into a new .venv",
    r"no kernel image|CUDA driver version": "install a newer NVIDIA driver",
    r"Python\.h|C compiler|CxxCompiler": "apt install build-essential python3-dev",
    r"No space left": "make room on that disk, or set TMPDIR to a folder on a larger one",
    r"NCCL": "NCCL_DEBUG=INFO tells more; NCCL_P2P_DISABLE=1 rules out peer access",
    r"SIGKILL": "host memory may be used up (dmesg | tail): end other processes",
    r"SIGBUS": "/dev/shm or a disk may be full: df -h shows it",  # nosec B108 # a message
}
"""What the last words contain -> the fix."""


def run(steps: Sequence[Step], setup: Setup, seconds: float) -> Iterator[tuple[str, float]]:
    """Runs the steps and yields (name, seconds) of each at its end. What `results` then returns for
    it is complete. A step that `seconds`, the deadline, cuts off gets the line NO TIME."""
    end_s = time.monotonic() + seconds
    num_together = max(2, len(os.sched_getaffinity(0)) // max(1, setup.num_gpus))
    if not setup.tiny:
        num_together = min(num_together, max(1, int(setup.gpu_gb // SMALL_GB)))
    for is_alone, group in groupby(steps, lambda step: step.is_alone and not setup.tiny):
        pool = ThreadPoolExecutor(1 if is_alone else num_together)
        try:
            for future in as_completed([pool.submit(_run, s, setup, end_s) for s in group]):
                yield future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            kill(*descendants(os.getpid()))
            raise
        pool.shutdown()


def _run(step: Step, setup: Setup, end_s: float) -> tuple[str, float]:
    """Runs a step in a process group of its own; returns its name and seconds."""
    start_s = time.monotonic()
    if line := _obstacle(step, setup, end_s - start_s):
        record(setup, step.name, line)
        return step.name, 0.0
    limit_s = min(step.limit_s, end_s - start_s)
    folder, log = Path(setup.folder, step.name), Path(setup.out, f"{step.name}.log")
    folder.mkdir(parents=True, exist_ok=True)
    given = json.dumps(asdict(replace(setup, folder=str(folder))))
    # Like `rl` itself, a step imports from the working folder only where that is the clone.
    command = [sys.executable, *["-P"] * sys.flags.safe_path, "-m", "rl.tools.gpu_checks"]
    command += [step.name, step.function, f"{start_s + limit_s}", given, *step.arguments]
    # No downloads; few threads, as steps run side by side.
    environment = {"OMP_NUM_THREADS": "2", **os.environ, "HF_HUB_OFFLINE": "1"}
    environment |= {"TMPDIR": setup.folder} | (ON_CPU if setup.tiny else {})
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, env=environment, start_new_session=True
        )
    code = None
    with suppress(subprocess.TimeoutExpired):
        code = process.wait(limit_s)
    kill(*descendants(process.pid))  # ranks are process groups of their own
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if code != 0:
        record(setup, step.name, _failed(step, code, limit_s, log.read_text(errors="replace")))
    return step.name, time.monotonic() - start_s


def _failed(step: Step, code: int | None, limit_s: float, log: str) -> Line:
    """The line of a step that did not end well. `code`: None if it was ended after `limit_s`."""
    log = shareable(log)
    if code is None and limit_s < step.limit_s:
        return Line("NO TIME", step.name, f"cut off by --limit after {limit_s:.0f} s")
    note = last_words(log)
    if code is None:
        # Where the main thread was, by the dump that a step writes just before its limit.
        main = log.rpartition("Timeout (")[2].rpartition("most recent call first")[2]
        frame = re.search(r'File "([^"]+)", line (\d+) in (\S+)', main)
        place = f", in {frame[3]} ({frame[1]}:{frame[2]})" if frame else ""
        note = f"no end within {limit_s:g} s{place}"
    elif code < 0:
        note = f"ended by {signal.Signals(-code).name}; {note}"
    keys = "; ".join(f"set {key}={value}" for key, value in step.keys.items())
    fix = f"{keys or 'no key avoids it'}; report it with an issue"
    known = (fix for words, fix in FIXES.items() if re.search(words, note))
    return Line("FAIL", step.name, note, next(known, fix), step.keys)


def _obstacle(step: Step, setup: Setup, left_s: float) -> Line | None:
    """The line of a step that cannot run here."""
    if any(line.what == "PyTorch" and line.status == "FAIL" for line in results(setup, "machine")):
        return skipped(step.name, "see PyTorch")
    if setup.tiny and (step.needs_gpu or step.needs_large_gpu):
        return skipped(step.name, NEEDS_CUDA)
    if step.needs_large_gpu and setup.gpu_gb < LARGE_GPU_GB:
        return skipped(step.name, f"needs a GPU of 80 GB, the smallest has {setup.gpu_gb:.0f}")
    if find_spec(re.split(r"\W", step.function)[0]) is None:
        return skipped(step.name, "comes with a clone, not with the wheel")
    if step.package and find_spec(step.package) is None:
        fix = "install requirements.lock into a new .venv"
        return Line("FAIL", step.name, f"{step.package} is not installed", fix, step.keys)
    if left_s < min(step.limit_s, MIN_START_S):
        return Line("NO TIME", step.name, f"not started, {max(0.0, left_s):.0f} s were left")
    return None


def record(setup: Setup, step: str, line: Line) -> None:
    """Append a line of a step to the results, and wait until it is on the disk."""
    row = asdict(replace(line, note=shareable(line.note), fix=shareable(line.fix)))
    results_file = Path(setup.out, RESULTS)
    append_line(results_file, json_line({"step": step, "at_s": round(time.time(), 1), **row}))
    fsync(results_file)


def results(setup: Setup, step: str) -> list[Line]:
    """The lines of a step so far."""
    rows, _ = read_rows(Path(setup.out, RESULTS))
    names = Line.__dataclass_fields__
    return [Line(**{name: row[name] for name in names}) for row in rows if row["step"] == step]


def descendants(pid: int) -> list[int]:
    """The processes that `pid` started, and those that they started."""
    with suppress(psutil.NoSuchProcess):
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    return []


def kill(*pids: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def last_words(log: str) -> str:
    """The last error that a log names, else its last line."""
    lines = [line.strip() for line in log.split("\n") if line.strip()]
    errors = [line for line in lines if re.match(r"- |[\w.]*(Error|Exception)\b", line)]
    return ([*lines[-1:], *errors[-1:]] or ["it printed nothing"])[-1][:300]


def _child(name: str, function: str, end_s: str, setup: str, *arguments: str) -> None:
    """Record each line of a step; what it and libraries print is its log."""
    printing.guard()
    signals.die_with_parent()
    # Where it hangs, just before the parent ends it.
    faulthandler.dump_traceback_later(max(float(end_s) - time.monotonic() - 1, 0.1), file=2)
    given = Setup(**json.loads(setup))
    module, _, attribute = function.partition(":")
    for line in getattr(importlib.import_module(module), attribute)(given, *arguments):
        record(given, name, line)


# ---- program -------------------------------------------------------------------------------------
# What `rl check-gpu` and `rl bench-gpu` share: options, the run of the steps, table and report.

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


def run_all(
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
    title = f"{parser.prog}, {', '.join(gpu.name for gpu in found) or 'CPU, --tiny'}"
    done: dict[str, tuple[float, list[Line]]] = {}
    with tempfile.TemporaryDirectory(prefix="check_gpu_", ignore_cleanup_errors=True) as folder:
        out = str(args.out.resolve())
        setup = Setup(folder, out, args.tiny, len(found), size_gb, config, list(overrides))
        for name, seconds in run(chosen, setup, args.limit):
            done[name] = seconds, results(setup, name)
            for line in done[name][1]:
                show(line.text(), marks=_MARKS)
                keys |= line.keys
            end = [table(done), folded(verdict(done, all_good))]
            end += [f"recommended: {key}={value}" for key, value in keys.items()]
            (args.out / "report.md").write_text(report(title, done, end), encoding="utf-8")
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
        (args.out / RESULTS).write_text("")
    except OSError as error:
        parser.error(f"--out {args.out}: {error.strerror}; name a folder that can be written")
    return [step for step in known if step.name in wanted]


def _counts(lines: Sequence[Line]) -> str:
    """'8 PASS, 1 FAIL'."""
    counts = Counter(line.status for line in lines)
    order = ("PASS", "MEASURED", "FAIL", "NO TIME", "SKIPPED")
    return ", ".join(f"{counts[status]} {status}" for status in order if counts[status])


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
    versions = sorted(installed("vlm-edit-rl").items())
    told = [f"Python {platform.python_version()}", *(f"{n} {v}" for n, v in versions)]
    parts = [f"# {title}", ", ".join(told)]
    for name, (seconds, lines) in done.items():
        texts = [line.text() for line in lines]
        parts.append("\n".join([f"## {name}, {seconds:.0f} s", "```", *texts, "```"]))
    return shareable("\n\n".join([*parts, "```\n" + "\n".join(end) + "\n```"])) + "\n"


if __name__ == "__main__":
    _child(*sys.argv[1:])
