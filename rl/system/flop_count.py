"""Counting the operations that really run, one by one.

What: `FlopCount`, a mode under which every matrix product, convolution and attention call adds what
it computes, and `Watch`, which puts a frozen model's forward under it once per shape. What not: a
language model's passes, whose shapes never repeat (`flops.py`). Called by `work.watch`, tests and
benchmarks.

Torch's own counter (`torch.utils.flop_counter`) gives the formulas. It does not know the CPU's
attention kernel, which would count as nothing, and takes causal attention for the full square,
though every kernel leaves out the blocks above the diagonal.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import (
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from rl.system.work import Work, add

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


def _cpu_attention(query: Any, key: Any, value: Any, *rest: Any, **more: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def _cpu_attention_backward(
    grad: Any, query: Any, key: Any, value: Any, *rest: Any, **more: Any
) -> int:
    return int(sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape))


_FORMULAS: Mapping[Any, Callable[..., int]] = {
    **flop_registry,
    aten._scaled_dot_product_flash_attention_for_cpu: _cpu_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _cpu_attention_backward,
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


class Watch:
    """The two hooks of one watched model, which runs on one thread at a time."""

    def __init__(self, key: Callable[..., Hashable] | None) -> None:
        """See `work.watch`."""
        self._key_of = key or _shapes
        self._known: dict[Hashable, Work] = {}
        self._key: Hashable = None
        self._counting: tuple[ExitStack, FlopCount] | None = None

    def before(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook: start counting, if it is not known what this forward costs."""
        _thread.depth += 1
        if _thread.depth > 1:
            return
        self._key = self._key_of(*args, **kwargs)
        if self._key not in self._known:
            stack = ExitStack()
            # Compiled code that meets a mode is never compiled again.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            self._counting = stack, stack.enter_context(FlopCount())

    def after(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Forward hook, also of one that raised: its `output` is None, and it counts nothing."""
        _thread.depth -= 1
        if _thread.depth > 0:
            return
        if self._counting is not None:
            stack, count = self._counting
            self._counting = None
            stack.close()
            if output is not None:
                self._known[self._key] = Work(count.flops, _weight_bytes(model))
        if output is not None:
            add(self._known[self._key])


class _Thread(threading.local):
    depth = 0
    """Watched forwards under way, one inside the other."""


_thread = _Thread()


def _shapes(*args: Any, **kwargs: Any) -> Hashable:
    """What a frozen model's cost depends on, unless it says otherwise."""
    return tuple(
        tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else leaf
        for leaf in tree_leaves((args, kwargs))
        if isinstance(leaf, torch.Tensor | int)
    )


def _weight_bytes(model: torch.nn.Module) -> int:
    """Whole, whatever part of them this rank holds."""
    return sum(getattr(p, "ds_numel", p.numel()) * p.element_size() for p in model.parameters())
