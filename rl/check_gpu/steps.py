"""The steps of `rl check-gpu` in order, and the parent's side of one: a child with a time limit."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from rl.check_gpu.lines import NEEDS_CUDA, Asked, Line, failed, shareable, skipped

REAL_SIZE_GB = 78.0
"""An "80 GB" GPU has at least this many."""


@dataclass(frozen=True)
class Step:
    """One child process."""

    name: str
    function: str
    """`module:function`, which yields `Line`s."""
    limit_s: float
    needs_cuda: bool = False
    needs_gb: float = 0.0
    fix: str = "send the report with an issue; the other lines do not depend on this one"
    """For a failure that `FIXES` does not know."""
    keys: dict[str, str] = field(default_factory=dict)
    """Config keys that avoid what this step failed at."""

    def missing(self, asked: Asked) -> str:
        """Why the step cannot run here; '' if it can."""
        if asked.tiny:
            return NEEDS_CUDA if self.needs_cuda or self.needs_gb else ""
        if asked.gpu_gb < self.needs_gb:
            return f"needs a GPU of 80 GB, this one has {asked.gpu_gb:.0f}"
        return ""


NO_ENGINE = "set engine.type=transformers (slower sampling), and send the report with an issue"
NO_KERNEL = "set policy.attn_implementation=sdpa, and send the report with an issue"
ENGINE, KERNEL = {"engine.type": "transformers"}, {"policy.attn_implementation": "sdpa"}
STEPS = (
    Step("machine", "rl.check_gpu.gpu_machine:machine", 60),
    Step("packed attention", "rl.check_gpu.gpu_kernels:kernels", 120, fix=NO_KERNEL, keys=KERNEL),
    Step("renderer kernels", "rl.check_gpu.gpu_renderers:renderers", 180),
    Step("attention speed", "rl.check_gpu.gpu_speed:attention_backends", 120),
    Step("compiled block", "rl.check_gpu.gpu_speed:compiled_block", 180),
    Step("collectives", "rl.check_gpu.gpu_ranks:collectives", 180),
    Step("vLLM, adapter", "rl.check_gpu.gpu_engines:adapter", 240, fix=NO_ENGINE, keys=ENGINE),
    Step("vLLM, deepstack", "rl.check_gpu.gpu_engines:deepstack", 240, fix=NO_ENGINE, keys=ENGINE),
    Step("vLLM, grammar", "rl.check_gpu.gpu_engines:grammar", 240, fix=NO_ENGINE, keys=ENGINE),
    Step("loop, quickstart", "rl.check_gpu.gpu_ranks:quickstart", 300),
    Step("loop, Qwen-Image-2.1", "rl.check_gpu.gpu_ranks:image_21", 300),
    Step("real size, Edit", "rl.check_gpu.real_size:edit", 240, needs_gb=REAL_SIZE_GB),
    Step("real size, 2.1", "rl.check_gpu.real_size:image_21", 240, needs_gb=REAL_SIZE_GB),
    Step("real size, policy", "rl.check_gpu.real_size:policy", 240, needs_gb=REAL_SIZE_GB),
)

FIXES = (
    (r"out of memory", "end other processes on the GPU (nvidia-smi), or use a larger GPU"),
    (r"No module named|PackageNotFound", "install requirements.lock into a new .venv"),
    (r"no kernel image|CUDA driver version|forward compatibility", "install a newer NVIDIA driver"),
    (r"Python\.h|C compiler|InvalidCxxCompiler", "apt install build-essential python3-dev"),
    (r"No space left", "make room on that disk, or set TMPDIR to a folder on a larger one"),
    (r"NCCL|NCCL_DEBUG", "NCCL_DEBUG=INFO tells more; NCCL_P2P_DISABLE=1 rules out peer access"),
)
"""(what the last words contain, the fix)."""
ENDED = {
    signal.SIGKILL: "host memory may be used up (dmesg | tail); end other processes",
    signal.SIGBUS: "/dev/shm or a disk may be full; df -h shows it",
}


def run_step(step: Step, asked: Asked) -> Iterator[Line]:
    """The step's lines; a hang, a signal or a traceback becomes a FAIL after the lines it had."""
    if why := step.missing(asked):
        yield skipped(step.name, why)
        return
    stem = Path(asked.folder, re.sub(r"\W+", "-", step.name))
    out, err = stem.with_suffix(".jsonl"), stem.with_suffix(".log")
    text = json.dumps(asdict(replace(asked, limit_s=step.limit_s)))
    # Like `rl` itself, a step imports from the working folder only where that is the clone.
    isolated = ["-P"] if sys.flags.safe_path else []
    command = [sys.executable, *isolated, "-m", "rl.check_gpu.step", step.function, text]
    with out.open("wb") as to_out, err.open("wb") as to_err:
        child = subprocess.Popen(
            command, stdout=to_out, stderr=to_err, env=environment(asked), start_new_session=True
        )
        try:
            child.wait(step.limit_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            is_late = child.returncode is None
            if is_late or child.returncode < 0:
                with suppress(ProcessLookupError):  # with what it started
                    os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    for row in out.read_text(errors="replace").split("\n"):
        with suppress(ValueError, TypeError):
            line = Line(**json.loads(row))
            yield replace(line, note=shareable(line.note), fix=shareable(line.fix))
    log = shareable(err.read_text(errors="replace"))
    if is_late:
        yield _failure(step, f"no end within {step.limit_s:g} s; {_place(log)}", log)
    elif child.returncode < 0:
        number = signal.Signals(-child.returncode)
        yield _failure(step, f"ended by {number.name}; {last_words(log)}", log, ENDED.get(number))
    elif child.returncode > 0:
        yield _failure(step, last_words(log), log)


def environment(asked: Asked) -> dict[str, str]:
    """A step's: without downloads, and on the CPU one thread, as the ranks of a run have."""
    found = {**os.environ, "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
    if asked.tiny:
        found |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    return found


def _failure(step: Step, note: str, log: str, fix: str | None = None) -> Line:
    known = (remedy for words, remedy in FIXES if re.search(words, last_words(log)))
    return replace(failed(step.name, note, fix or next(known, step.fix)), keys=step.keys)


def last_words(log: str) -> str:
    """The last error that a log names, else its last line."""
    lines = [line.strip() for line in log.split("\n") if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Exit|Interrupt)\b", line)]
    return ([*lines[-1:], *errors[-1:]] or ["it printed nothing"])[-1][:300]


def _place(log: str) -> str:
    """Where the main thread was, by the dump that a step writes before its end."""
    dump = log.rpartition("Timeout (")[2]
    stack = dump.partition("most recent call first")[2] if dump != log else ""
    main = dump.rpartition("most recent call first")[2] if stack else ""
    frame = re.search(r'File "([^"]+)", line (\d+) in (\S+)', main)
    return f"it was in {frame[3]} ({frame[1]}:{frame[2]})" if frame else last_words(log)
