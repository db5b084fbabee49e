"""Modules under ZeRO-3: every call gathers their weights from all ranks, so all ranks must call."""

from __future__ import annotations

from typing import Any


def is_sharded(module: Any) -> bool:
    return any(hasattr(parameter, "ds_id") for parameter in module.parameters())


def calls_in_step(num_calls: int, module: Any) -> int:
    """How often to call the module: `num_calls` or, if it is sharded, the most of any rank."""
    if not is_sharded(module):
        return num_calls
    import torch

    most = torch.tensor(num_calls, device=next(module.parameters()).device)
    torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
    return int(most)
