"""Steps of `rl check-gpu` with a fault planted; each runs in a child process, as the real ones."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from rl.check_gpu.lines import Asked, Line, result

NEVER_JOINS = """
import time
from rl.commands import check_distributed as check
check.TIMEOUT_S = 2.0
real = check.communicators
check.communicators = lambda dist: time.sleep(60) if dist.rank else real(dist)
check.main()
"""


def killed(asked: Asked) -> Iterator[Line]:
    yield result("before it", True)
    os.kill(os.getpid(), signal.SIGKILL)


def hanging(asked: Asked) -> Iterator[Line]:
    yield result("before it", True)
    time.sleep(60)


def out_of_memory(asked: Asked) -> Iterator[Line]:
    yield result("before it", True)
    raise RuntimeError(f"CUDA out of memory in {Path.home()}/secret/place.py")


def noisy(asked: Asked) -> Iterator[Line]:
    print("not a line of ours")
    os.write(1, b"nor is this\n")
    yield result("the only one", True)


def wrong_kernel(asked: Asked) -> Iterator[Line]:
    from rl.algorithm import attention_kernels
    from rl.check_gpu import gpu_kernels

    def forward(*tensors: Any) -> Any:
        out, lse = attention_kernels.CPU.forward(*tensors)
        return 1.01 * out, lse

    kernel = attention_kernels.Kernel(forward, attention_kernels.CPU.backward)
    gpu_kernels.LARGEST_ERROR["float32"] = gpu_kernels.LARGEST_ERROR["bfloat16"]
    gpu_kernels.LARGEST_BIAS["float32"] = gpu_kernels.LARGEST_BIAS["bfloat16"]
    with mock.patch.object(attention_kernels, "choose_kernel", lambda *_: kernel):
        yield next(iter(gpu_kernels.kernels(asked)))


def dead_sync(asked: Asked) -> Iterator[Line]:
    from rl.check_gpu import gpu_engines
    from rl.engines.vllm.vllm import VllmEngine

    with mock.patch.object(VllmEngine, "load_weights", lambda engine, weights: None):
        yield next(line for line in gpu_engines.adapter(asked) if "weight sync" in line.what)


def rank_that_never_joins(asked: Asked) -> Iterator[Line]:
    from rl.check_gpu import gpu_ranks

    script = Path(asked.folder, "never_joins.py")
    script.write_text(NEVER_JOINS)
    yield from gpu_ranks.collectives(asked, script)


def loop_that_cannot_resume(asked: Asked) -> Iterator[Line]:
    """Its second start has another learning rule, which a run may not change."""
    from rl.check_gpu import gpu_ranks

    call = gpu_ranks.subprocess.call

    def other_call(command: list[str], **more: Any) -> int:
        return call([*command, "policy.lora.r=4"], **more)

    with mock.patch.object(gpu_ranks.subprocess, "call", other_call):
        yield from gpu_ranks.loop(asked, "quickstart", "engine.type=transformers")
