"""Checks that the ranks of this machine reach each other: `rl check-distributed --nproc N`."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rl import printing
from rl.ranks.dist import Dist

if TYPE_CHECKING:
    import torch

Sum = Callable[["torch.Tensor"], "torch.Tensor"]
"""A tensor -> its sum over all ranks."""
TIMEOUT_S = 120.0
"""If the sums have not finished by then, the communicator in use counts as hung."""
NUM_VALUES = 1_000_003
"""Odd and several MB, so that every chunked path runs, the shorter last chunk included."""


def main() -> None:
    """Sum a known tensor over all ranks with each communicator that a run may use. Rank 0 prints a
    line for each. Exit code: 1, with the reason, if a sum is wrong or does not arrive."""
    printing.guard()
    import torch.distributed  # noqa: F401 # before the timer: a slow disk is no hang

    timer = deadline()
    dist = Dist.from_env()  # the ranks meet here
    timer.cancel()
    timer = deadline()
    for name, device, sum_ in communicators(dist):
        if isinstance(sum_, str):
            line = f"{name} skipped: {sum_}"
        else:
            line = f"{name} is successful!"
            problems = [p for p in dist.gather(wrong_sum(sum_, dist, device)) if p]
            if problems:
                sys.exit("\n".join(f"{name} {p}" for p in problems) if dist.is_main else 1)
        if dist.is_main:
            print(line, flush=True)
    timer.cancel()
    dist.close()


def deadline() -> threading.Timer:
    """Ends this process unless it is cancelled within `TIMEOUT_S`."""
    timer = threading.Timer(TIMEOUT_S, give_up, [os.environ.get("RANK", "0")])
    timer.daemon = True
    timer.start()
    return timer


def give_up(rank: str) -> None:
    """End this process with exit code 1."""
    print(
        f"rank {rank} waited {TIMEOUT_S:.0f} s for the other ranks. The communicator that "
        "hangs is the first without a line on rank 0 (Gloo, if there is no line); "
        "NCCL_DEBUG=INFO tells more (if the network interface is wrong, set NCCL_SOCKET_IFNAME or "
        "GLOO_SOCKET_IFNAME)",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)


def communicators(dist: Dist) -> Iterator[tuple[str, str, Sum | str]]:
    """(name, device, its sum function or why it is skipped) of Gloo and NCCL; NCCL connects when it
    is used. A vLLM engine has no communicator: it stays within its rank."""
    if dist.world_size == 1:
        yield "PyTorch GLOO", "cpu", "one process has no other rank to sum with (--nproc 2)"
        return
    yield "PyTorch GLOO", "cpu", dist.sum_
    on_gpu = dist.device.startswith("cuda")
    yield "PyTorch NCCL", dist.device, dist.sum_ if on_gpu else "this machine has no CUDA device"


def wrong_sum(sum_: Sum, dist: Dist, device: str) -> str:
    """What is wrong with a sum of known values; '' if it is right. The values differ by rank and
    by position, and their sums are exact in float32."""
    import torch

    values = torch.arange(NUM_VALUES, device=device, dtype=torch.float32) % 1000
    num_ranks = dist.world_size
    expected = num_ranks * values + num_ranks * (num_ranks - 1) / 2
    total = sum_(values + dist.rank)
    wrong = (total != expected).nonzero().flatten()
    if not len(wrong):
        return ""
    first = int(wrong[0])
    return (
        f"sums wrongly on rank {dist.rank}: {len(wrong)} of {NUM_VALUES} values, the first at "
        f"{first}: {float(total[first])} instead of {float(expected[first])}"
    )


if __name__ == "__main__":
    main()
