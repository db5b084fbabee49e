"""The interface of optimizer backends, and the backend in plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from rl.api.types import TokenBatch, TokenOutputs
from rl.config.schema import OptimizerConfig
from rl.ranks.dist import Dist

Tensors = dict[str, torch.Tensor]
STATE_PARTS = ("master", "exp_avg", "exp_avg_sq")
"""Parts of the state of each trained parameter, float32; keys are `<part>/<parameter's name>`."""


@dataclass(frozen=True)
class StepOutcome:
    grad_norm: float
    """Global L2 norm before clipping; inf or NaN when the step was skipped."""
    applied: bool
    """False: the gradient was not finite, and weights and moments are untouched."""


class Backend(Protocol):
    """All methods are collective; `forward` and `backward` only if `lockstep`.

    Gradients are SUMMED over backward calls and ranks: each loss is already divided by a global
    denominator. The state is always complete (unsharded), so that a run may continue under another
    backend, ZeRO stage or world size.
    """

    lockstep: bool
    """Ranks must run equally many forwards and backwards, in the same order."""
    keeps_graphs: bool
    """Several forwards may come before their backwards, and each rank decides the order itself."""

    def forward(self, batch: TokenBatch) -> TokenOutputs: ...

    def backward(self, loss: torch.Tensor) -> None:
        """Add d loss / d weights to this step's gradient."""

    def step(self, learning_rate: float, gradient_scale: float) -> StepOutcome:
        """Sum the gradient over ranks, multiply it by `gradient_scale` (> 0, the same on every
        rank: planned / graded denominator), clip its global norm, take an AdamW step, and clear it.
        """

    def masters(self) -> Tensors:
        """The complete trainable weights in float32, on every rank; may alias the live ones."""

    def state(self, keep: bool) -> Tensors:
        """`STATE_PARTS` of every parameter as CPU copies; empty on a rank that does not `keep`."""

    def load(self, state: Tensors, num_steps: int) -> None:
        """Restore what `state` returned; every rank passes all of it."""


def trainable_parameters(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters that require a gradient, by name. Raises ValueError when there are none, or
    when they mix dtypes."""
    trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not trainable:
        raise ValueError("the policy has no trainable parameter: use LoRA or full fine-tuning")
    if len(dtypes := {str(p.dtype) for p in trainable.values()}) > 1:
        raise ValueError(f"trainable parameters must share one dtype, not {sorted(dtypes)}")
    return trainable


def make_adamw(
    module: torch.nn.Module, parameters: Mapping[str, torch.Tensor], config: OptimizerConfig
) -> torch.optim.AdamW:
    """Make PyTorch's AdamW; DeepSpeed's fused AdamW would be compiled at first use.

    `parameters`: the tensors to step, keyed as `module.named_parameters()`. With weight decay, a
    second parameter group holds those without decay: vectors (norms, biases) and embeddings, which
    may also be the tied output head. An adapter's matrices are decayed.
    """
    embeddings = {
        id(parameter)
        for part in module.modules()
        if isinstance(part, torch.nn.Embedding | torch.nn.EmbeddingBag)
        for parameter in part.parameters(recurse=False)
    }
    all_parameters = module.named_parameters() if config.weight_decay else ()
    undecayed = {name for name, p in all_parameters if p.ndim < 2 or id(p) in embeddings}
    groups: list[dict[str, Any]] = [
        {"params": [p for n, p in parameters.items() if n not in undecayed]},
        {"params": [p for n, p in parameters.items() if n in undecayed], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.adam_eps,
        weight_decay=config.weight_decay,
    )


class TorchBackend:
    """Replicated weights; gradients summed over ranks by hand; float32 masters where needed."""

    lockstep = False
    keeps_graphs = True

    def __init__(self, module: torch.nn.Module, config: OptimizerConfig, dist: Dist) -> None:
        self._module = module
        self._dist = dist
        self._max_grad_norm = config.max_grad_norm
        self._parameters = trainable_parameters(module)
        self._masters = {
            name: p if p.dtype == torch.float32 else torch.nn.Parameter(p.detach().float())
            for name, p in self._parameters.items()
        }
        self._adamw = make_adamw(module, self._masters, config)

    def forward(self, batch: TokenBatch) -> TokenOutputs:
        return self._module(batch)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()
        for name, parameter in self._parameters.items():
            master = self._masters[name]
            if master is parameter or parameter.grad is None:
                continue
            # Summed over micro-batches in float32: bfloat16 sums would drop small gradients.
            grad = parameter.grad.float()
            master.grad = grad if master.grad is None else master.grad + grad
            parameter.grad = None

    def step(self, learning_rate: float, gradient_scale: float) -> StepOutcome:
        masters = list(self._masters.values())
        for master in masters:
            if master.grad is None:
                master.grad = torch.zeros_like(master)
            self._dist.sum_(master.grad).mul_(gradient_scale)
        grad_norm = float(torch.nn.utils.clip_grad_norm_(masters, self._max_grad_norm))
        applied = math.isfinite(grad_norm)
        if applied:
            for group in self._adamw.param_groups:
                group["lr"] = learning_rate
            self._adamw.step()
            self._write_back()
        self._adamw.zero_grad(set_to_none=True)
        return StepOutcome(grad_norm, applied)

    def _write_back(self) -> None:
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                if self._masters[name] is not parameter:
                    parameter.copy_(self._masters[name])

    def masters(self) -> Tensors:
        return {name: master.detach() for name, master in self._masters.items()}

    def state(self, keep: bool) -> Tensors:
        state: Tensors = {}
        for name, master in self._masters.items() if keep else ():
            parts = {"master": master, **self._adamw.state.get(master, {})}
            for part in STATE_PARTS:
                tensor = parts[part] if part in parts else torch.zeros(master.shape)
                state[f"{part}/{name}"] = cpu_copy(tensor)
        return state

    def load(self, state: Tensors, num_steps: int) -> None:
        with torch.no_grad():
            for name, master in self._masters.items():
                weights, *moments = (state[f"{part}/{name}"] for part in STATE_PARTS)
                master.copy_(weights)
                exp_avg, exp_avg_sq = (m.to(master.device, copy=True) for m in moments)
                self._adamw.state[master] = {
                    "step": torch.tensor(float(num_steps)),
                    "exp_avg": exp_avg,
                    "exp_avg_sq": exp_avg_sq,
                }
        self._write_back()


def cpu_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous float32 copy on the CPU, which shares no memory with `tensor`."""
    return tensor.detach().to("cpu", torch.float32, copy=True).contiguous()
