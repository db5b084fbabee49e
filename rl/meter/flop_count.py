"""Counting the operations that really run: every matrix product, convolution and attention call.

Torch's own counter (`torch.utils.flop_counter`) gives the formulas. It does not know the CPU's
attention kernel, which would count as nothing, and takes causal attention for the full square,
though every kernel leaves out the blocks above the diagonal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten


class FlopCount(TorchDispatchMode):
    """Adds up `flops` of everything that runs inside, backward passes included."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0.0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        formula = _FORMULAS.get(getattr(func, "overloadpacket", func))
        if formula is None and isinstance(func, torch._ops.OpOverload):
            with self:  # in inference mode composites come whole: `linear`, attention
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        if formula is not None:
            flops = formula(*args, **kwargs, out_val=result)
            self.flops += flops * _causal_share(func, args, kwargs)
        return result


_FORMULAS: Mapping[Any, Callable[..., int]] = {
    **flop_registry,
    aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[
        aten._scaled_dot_product_flash_attention
    ],
    aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        aten._scaled_dot_product_flash_attention_backward
    ],
}


def _causal_share(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float:
    """Pairs on and below the diagonal over all pairs, of a call that says `is_causal`; else 1."""
    if not isinstance(func, torch._ops.OpOverload):
        return 1.0
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    if not given.get("is_causal", False):
        return 1.0
    num_queries, num_keys = given["query"].shape[-2], given["key"].shape[-2]
    square = min(num_queries, num_keys)
    pairs = square * (square + 1) / 2 + max(0, num_queries - num_keys) * num_keys
    return float(pairs / (num_queries * num_keys))
