"""The steps of `rl check-gpu` in order; each runs in a child process with a time limit.

The child is `python -m rl.check_gpu.steps <module:function> <Asked as JSON>`.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path

from rl.check_gpu.lines import NEEDS_CUDA, Asked, Line, shareable, skipped
from rl.ranks import signals
from rl.text import terminal

_HERE = "rl.check_gpu"


@dataclass(frozen=True)
class Step:
    name: str
    function: str
    """`module:function`, which yields `Line`s."""
    limit_s: float
    needs_gb: float = 0.0
    """Memory of the GPU; > 0 also means that it runs on no CPU."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Config keys that avoid what failed here."""


KERNEL, ENGINE = {"policy.attn_implementation": "sdpa"}, {"engine.type": "transformers"}
STEPS = (
    Step("machine", f"{_HERE}.gpu_machine:machine", 60),
    Step("packed attention", f"{_HERE}.gpu_kernels:kernels", 120, keys=KERNEL),
    Step("renderers", f"{_HERE}.gpu_renderers:renderers", 180),
    Step("attention backends", "benchmarks.gpu_speed:backends", 120),
    Step("compiled block", "benchmarks.gpu_speed:compiled_block", 180, needs_gb=1),
    Step("collectives", f"{_HERE}.gpu_ranks:collectives", 180),
    Step("vLLM, adapter", f"{_HERE}.gpu_engines:adapter", 240, keys=ENGINE),
    Step("vLLM, deepstack", f"{_HERE}.gpu_engines:deepstack", 240, keys=ENGINE),
    Step("vLLM, grammar", f"{_HERE}.gpu_engines:grammar", 240, keys=ENGINE),
    Step("loop of quickstart", f"{_HERE}.gpu_ranks:quickstart", 300),
    Step("loop of tiny_qwen_image_21", f"{_HERE}.gpu_ranks:image_21", 300),
    Step("real size, Edit", "benchmarks.gpu_real_size:edit", 240, needs_gb=78),
    Step("real size, Qwen-Image-2.1", "benchmarks.gpu_real_size:image_21", 240, needs_gb=78),
    Step("real size, policy", "benchmarks.gpu_real_size:policy", 240, needs_gb=78),
)
"""An "80 GB" GPU has at least 78."""

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


def run_step(step: Step, asked: Asked) -> Iterator[Line]:
    """The step's lines; a hang, a signal or a traceback is a FAIL after those that it had."""
    if step.needs_gb and (asked.tiny or asked.gpu_gb < step.needs_gb):
        large = f"needs a GPU of 80 GB, the smallest here has {asked.gpu_gb:.0f}"
        yield skipped(step.name, NEEDS_CUDA if asked.tiny else large)
        return
    if find_spec(re.split(r"\W", step.function)[0]) is None:
        yield skipped(step.name, "comes with a clone, not with the wheel")
        return
    out, err = (Path(asked.folder, f"{step.name}.{end}") for end in ("jsonl", "log"))
    # Like `rl` itself, a step imports from the working folder only where that is the clone.
    command = [sys.executable, *["-P"] * sys.flags.safe_path, "-m", f"{_HERE}.steps"]
    command += [step.function, json.dumps(asdict(replace(asked, limit_s=step.limit_s)))]
    with out.open("wb") as to_out, err.open("wb") as to_err:
        child = subprocess.Popen(
            command, stdout=to_out, stderr=to_err, env=_environment(asked), start_new_session=True
        )
        try:
            child.wait(step.limit_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            is_late = child.returncode is None
            if is_late or child.returncode < 0:
                kill(*descendants(child.pid))  # ranks are groups of their own
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    for row in out.read_text(errors="replace").split("\n"):
        with suppress(ValueError, TypeError):
            line = Line(**json.loads(row))
            yield replace(line, note=shareable(line.note), fix=shareable(line.fix))
    log = shareable(err.read_text(errors="replace"))
    if is_late:
        note = f"no end within {step.limit_s:g} s{_place(log)}"
    elif child.returncode < 0:
        note = f"ended by {signal.Signals(-child.returncode).name}; {last_words(log)}"
    elif child.returncode == 0:
        return
    else:
        note = last_words(log)
    keys = "; ".join(f"set {key}={value}" for key, value in step.keys.items())
    fix = f"{keys or 'no key avoids it'}; report it with an issue"
    known = (fix for words, fix in FIXES.items() if re.search(words, note))
    yield Line("FAIL", step.name, note, next(known, fix), step.keys)


def descendants(pid: int) -> list[int]:
    """The processes that `pid` started, and those that they started."""
    found: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for word in file.read_text().split():
                found += [int(word), *descendants(int(word))]
    return found


def kill(*pids: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _environment(asked: Asked) -> dict[str, str]:
    """No downloads; on the CPU one thread, as the ranks of a run have."""
    found = {**os.environ, "HF_HUB_OFFLINE": "1", "TMPDIR": asked.folder}
    if asked.tiny:
        found |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    return found


def last_words(log: str) -> str:
    """The last error that a log names, else its last line."""
    lines = [line.strip() for line in log.split("\n") if line.strip()]
    errors = [line for line in lines if re.match(r"- |[\w.]*(Error|Exception)\b", line)]
    return ([*lines[-1:], *errors[-1:]] or ["it printed nothing"])[-1][:300]


def _child() -> None:
    """Print each `Line` of a step as JSON; what libraries print goes to stderr."""
    terminal.guard()
    signals.die_with_parent()
    asked = Asked(**json.loads(sys.argv[2]))
    with os.fdopen(os.dup(1), "w") as results:
        os.dup2(2, 1)
        # Where it hangs, just before the parent ends it.
        faulthandler.dump_traceback_later(asked.limit_s - 1, file=2)
        module, _, function = sys.argv[1].partition(":")
        for line in getattr(importlib.import_module(module), function)(asked):
            print(json.dumps(asdict(line)), file=results, flush=True)


def _place(log: str) -> str:
    """Where the main thread was, by the dump that a step writes just before its limit."""
    main = log.rpartition("Timeout (")[2].rpartition("most recent call first")[2]
    frame = re.search(r'File "([^"]+)", line (\d+) in (\S+)', main)
    return f", in {frame[3]} ({frame[1]}:{frame[2]})" if frame else ""


if __name__ == "__main__":
    _child()
