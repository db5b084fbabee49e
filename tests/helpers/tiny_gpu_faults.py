"""Steps of `rl check-gpu` with a fault planted; each runs in a child process, as the real ones."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from rl.tools.gpu_checks import Line, Setup, measured, result

NEVER_JOINS = """
import time
from rl.tools.commands import check_distributed as check
check.TIMEOUT_S = 2.0
real = check.communicators
check.communicators = lambda dist: time.sleep(60) if dist.rank else real(dist)
check.main()
"""


def killed(setup: Setup) -> Iterator[Line]:
    yield result("before it", True)
    os.kill(os.getpid(), signal.SIGKILL)


def hanging(setup: Setup) -> Iterator[Line]:
    yield result("before it", True)
    time.sleep(60)


def out_of_memory(setup: Setup) -> Iterator[Line]:
    yield result("before it", True)
    raise RuntimeError(f"CUDA out of memory in {Path.home()}/secret/place.py")


def noisy(setup: Setup) -> Iterator[Line]:
    print("not a line of ours")
    os.write(1, b"nor is this\n")
    yield result("the only one", True)


def wrong_kernel(setup: Setup) -> Iterator[Line]:
    from rl.algorithm import attention_kernels
    from rl.tools import gpu_steps

    def forward(*tensors: Any) -> Any:
        out, lse = attention_kernels.CPU.forward(*tensors)
        return 1.01 * out, lse

    kernel = attention_kernels.Kernel(forward, attention_kernels.CPU.backward)
    gpu_steps.LARGEST_ERROR["float32"] = gpu_steps.LARGEST_ERROR["bfloat16"]
    gpu_steps.LARGEST_BIAS["float32"] = gpu_steps.LARGEST_BIAS["bfloat16"]
    with mock.patch.object(gpu_steps, "choose_kernel", lambda *_: kernel):
        yield next(iter(gpu_steps.kernels(setup)))


def dead_sync(setup: Setup) -> Iterator[Line]:
    from rl.engines.vllm import VllmEngine
    from rl.tools import gpu_steps

    with mock.patch.object(VllmEngine, "load_weights", lambda engine, weights: None):
        yield next(
            line
            for line in gpu_steps.engine(setup, "adapter", "quickstart")
            if "weight sync" in line.what
        )


def rank_that_never_joins(setup: Setup) -> Iterator[Line]:
    from rl.tools.commands import check_gpu

    script = Path(setup.folder, "never_joins.py")
    script.write_text(NEVER_JOINS)
    yield from check_gpu.collectives(setup, script)


def loop_that_cannot_resume(setup: Setup) -> Iterator[Line]:
    """Its second start has another learning rule, which a run may not change."""
    from rl.tools.commands import check_gpu

    start, more = check_gpu._start, [[], ["policy.lora.r=4"]]

    def start_another(command: list[str], log: Any) -> Any:
        return start([*command, *more.pop(0)], log)

    with mock.patch.object(check_gpu, "_start", start_another):
        yield from check_gpu.loop(setup, "quickstart", "engine.type=transformers")


def with_a_grandchild(setup: Setup) -> Iterator[Line]:
    """Starts a process in a session of its own, as a launcher does; then it waits."""
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    yield measured("child", "", pid=child.pid)
    time.sleep(60)


def quick(setup: Setup, *arguments: str) -> Iterator[Line]:
    yield measured("started", " ".join(arguments), at_s=time.monotonic())
    time.sleep(1.5)  # longer than another step takes to start on a busy machine
    yield measured("ended", "", at_s=time.monotonic())
