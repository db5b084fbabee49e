"""Makes a half-precision forward keep no float32 copies of its activations for the backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


def spare_activations(model: Any, gradient_checkpointing: bool | Literal["mlp"]) -> None:
    """Make the decoder's layers save fewer activations; `gradient_checkpointing` as in the config.

    In half precision each of transformers' norms and each of PEFT's adapters saves a float32 copy
    of its input, although the half-precision input is saved anyway.
    """
    if gradient_checkpointing is True:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return
    for layer in model.get_decoder().layers:
        if gradient_checkpointing == "mlp":
            recompute(layer.mlp)
        for name, norm in layer.named_modules():
            if name.endswith("norm") and norm.weight.dtype != torch.float32:
                recompute(norm, preserve_rng_state=False)
    _keep_adapters_inputs(model)


def recompute(module: Any, **options: Any) -> None:
    """Save only this module's input for the backward; recompute its activations there."""
    forward: Callable[[torch.Tensor], torch.Tensor] = module.forward

    def recomputed(hidden: torch.Tensor) -> Any:
        if not torch.is_grad_enabled():
            return forward(hidden)
        return checkpoint(forward, hidden, use_reentrant=False, **options)

    module.forward = recomputed


def _keep_adapters_inputs(model: Any) -> None:
    """Save adapter inputs in their own dtype, one tensor for all readers; the backward casts it.

    Adapters with dropout are left as they are: PEFT applies it to the float32 copy.
    """
    from peft.tuners.lora import LoraLayer

    for layer in model.modules():
        if not isinstance(layer, LoraLayer):
            continue
        for name, down in layer.lora_A.items():
            if isinstance(layer.lora_dropout[name], torch.nn.Identity):
                layer.cast_input_dtype_enabled = False
                down.forward = lambda hidden, down=down: _FloatLinear.apply(hidden, down.weight)


class _FloatLinear(torch.autograd.Function):
    """[*, D] of any float dtype, times a float32 weight [R, D] -> [*, R] float32."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        return functional.linear(hidden.to(weight.dtype), weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, weight = ctx.saved_tensors
        rows = hidden.to(weight.dtype).flatten(0, -2)
        return (grad @ weight).to(hidden.dtype), grad.flatten(0, -2).T @ rows
