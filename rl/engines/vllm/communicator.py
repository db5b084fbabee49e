"""vLLM's own all-reduces over the trainer's ranks, for `rl check-distributed` to try."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from rl.ranks.dist import Dist

Sum = Callable[["torch.Tensor"], "torch.Tensor"]
"""A tensor on the communicator's device -> its sum over all ranks."""


def gpu_sums(dist: Dist) -> tuple[Sum, Sum]:
    """(straight, from a CUDA graph). Raises RuntimeError where NCCL cannot be loaded."""
    _prepare()
    import torch
    import torch.distributed as td
    from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

    communicator = PyNcclCommunicator(td.new_group(backend="gloo"), dist.device)
    if not communicator.available:
        raise RuntimeError("vLLM cannot load NCCL: set VLLM_NCCL_SO_PATH to its libnccl.so")

    def straight(tensor: torch.Tensor) -> torch.Tensor:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        total = communicator.all_reduce(tensor, stream=stream)
        stream.synchronize()
        return total

    def graphed(tensor: torch.Tensor) -> torch.Tensor:
        # Captured over zeros: only a replay that really sums can give the right answer.
        held, graph = torch.zeros_like(tensor), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            total = communicator.all_reduce(held, stream=torch.cuda.current_stream())
        held.copy_(tensor)
        graph.replay()
        torch.cuda.synchronize()
        return total

    return straight, graphed


def cpu_sum(dist: Dist) -> Sum:
    """All ranks must be on one machine."""
    _prepare()
    # Names the shared memory; ranks of two runs on one machine must not meet in it.
    os.environ["VLLM_DIST_IDENT"] = dist.broadcast(uuid.uuid4().hex)
    import torch
    import torch.distributed as td
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    group = td.new_group(backend="gloo")
    # vLLM uses shared memory for groups whose name begins like this.
    communicator = CpuCommunicator(group, torch.device("cpu"), group, unique_name="tp:check")
    sum_: Sum = communicator.all_reduce
    return sum_


def _prepare() -> None:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # Some of it warns before its own configuration says how loud it may be.
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])
