"""Optimizer backends: AdamW on each rank, and DeepSpeed."""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from rl.api.types import TokenBatch, TokenOutputs
from rl.config.schema import OptimizerConfig
from rl.ranks.dist import Dist

# ---- backends ------------------------------------------------------------------------------------
# The interface of optimizer backends, and the backend in plain PyTorch.

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


# ---- deepspeed -----------------------------------------------------------------------------------
# DeepSpeed ZeRO 1-3 as an optimizer backend.

PERSISTENCE_THRESHOLD_NUMEL = 100_000
"""ZeRO-3 leaves parameters smaller than this whole on every rank (DeepSpeed's default)."""
MAX_BUCKET_NUMEL = 500_000_000
"""Upper bound of the gradient bucket (DeepSpeed's default)."""


def deepspeed_config(
    config: OptimizerConfig, dtype: torch.dtype, world_size: int, num_trainable: int
) -> dict[str, Any]:
    """The `config` argument of `deepspeed.initialize`.

    Raises ValueError for stage 1, which cannot keep float32 masters of bfloat16 parameters.
    """
    stage = config.zero_stage
    if dtype != torch.float32 and stage == 1:
        raise ValueError(
            f"optimizer.zero_stage 1 keeps no readable float32 masters for {dtype} trainable "
            "parameters: use zero_stage 2 or 3, or optimizer.backend 'torch'"
        )
    bucket = max(1, min(MAX_BUCKET_NUMEL, num_trainable))
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": bucket}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = PERSISTENCE_THRESHOLD_NUMEL
        # DeepSpeed's F.linear breaks non-reentrant checkpointing ("recomputed shape [0]").
        zero["memory_efficient_linear"] = False
    settings: dict[str, Any] = {
        # Batch sizes have no effect, since `learner.py` cuts the micro-batches.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "train_batch_size": world_size,
        # The number of micro-batches varies: the learner decides when to step.
        "managed_gradient_accumulation": False,
        "gradient_clipping": config.max_grad_norm,
        "zero_optimization": zero,
        "steps_per_print": 10**9,
    }
    # Only for bfloat16 trainable parameters (full fine-tuning), which thereby get float32 masters.
    # With float32 ones (LoRA on a bfloat16 base) it would cast the WHOLE module, adapters included.
    if dtype == torch.bfloat16:
        settings["bf16"] = {"enabled": True}
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    return settings


class DeepSpeedBackend:
    """One `deepspeed` engine around the policy's module."""

    def __init__(self, module: torch.nn.Module, config: OptimizerConfig, dist: Dist) -> None:
        deepspeed = _import_deepspeed(dist)
        self._dist = dist
        self._stage = config.zero_stage
        # Stage 2 reduces gradients in each backward; stage 3 also gathers weights in each forward.
        self.lockstep = dist.world_size > 1 and self._stage >= 2
        # Not in stage 3: its forwards are collective, so ranks would have to agree which to keep.
        self.keeps_graphs = self._stage < 3
        self._parameters = trainable_parameters(module)
        parameters = list(self._parameters.values())
        self._dtype = parameters[0].dtype
        num_trainable = sum(p.numel() for p in parameters)
        settings = deepspeed_config(config, self._dtype, dist.world_size, num_trainable)
        self._adamw = make_adamw(module, self._parameters, config)
        self._engine, *_ = deepspeed.initialize(
            model=module, optimizer=self._adamw, config=settings
        )

    def forward(self, batch: TokenBatch) -> TokenOutputs:
        return self._engine(batch)

    def backward(self, loss: torch.Tensor) -> None:
        # ZeRO finishes a backward only at the next forward; here another backward may come first.
        self._engine.optimizer.clear_backward_seen_flag()
        # ZeRO averages gradients over ranks; the learner needs their sum.
        self._engine.backward(loss * self._dist.world_size, scale_wrt_gas=False)

    def step(self, learning_rate: float, gradient_scale: float) -> StepOutcome:
        optimizer = self._engine.optimizer
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        if self._stage == 1:
            # Stage 1 reduces only gradients that this rank's backwards produced; all ranks must
            # reduce the same tensors, even a rank that ran no backward.
            optimizer.setup_buckets()
            for parameter in self._parameters.values():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        # ZeRO divides gradients by the loss scale before it computes their norm and clips them.
        optimizer.loss_scale = 1 / gradient_scale
        self._engine.step()
        optimizer.loss_scale = 1.0
        return StepOutcome(
            float(self._engine.get_global_grad_norm()), self._engine.was_step_applied()
        )

    def masters(self) -> Tensors:
        live = self._stage < 3 and self._dtype == torch.float32
        return {n: p.detach() if live else self._gather(p) for n, p in self._parameters.items()}

    # DeepSpeed's own checkpoints are not atomic, and are tied to stage and world size.
    def state(self, keep: bool) -> Tensors:
        state: Tensors = {}
        if self._stage < 3 and self._has_moments():
            self._link_moments()
        for name, parameter in self._parameters.items():
            for part in STATE_PARTS:
                # Collective: every rank gathers each tensor, one at a time, even without `keep`.
                tensor = self._gather(parameter, part)
                if keep:
                    state[f"{part}/{name}"] = cpu_copy(tensor)
        return state

    def _gather(self, parameter: torch.nn.Parameter, part: str = "master") -> torch.Tensor:
        """One parameter's whole float32 master or Adam moment (zeros before the first step)."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        shape = getattr(parameter, "ds_shape", parameter.shape)
        if part == "master":
            whole = safe_get_full_fp32_param(parameter)
        elif self._has_moments():
            whole = safe_get_full_optimizer_state(parameter, part)
        else:
            return torch.zeros(shape)
        return whole.detach().reshape(shape)

    def _flat_masters(self) -> list[torch.Tensor]:
        """The tensors that AdamW steps: flat shards of this rank."""
        if self._stage == 3:
            return list(self._engine.optimizer.fp32_partitioned_groups_flat)
        return [p for group in self._adamw.param_groups for p in group["params"]]

    def _has_moments(self) -> bool:
        return all("exp_avg" in self._adamw.state.get(p, {}) for p in self._flat_masters())

    def load(self, state: Tensors, num_steps: int) -> None:
        for flat in self._flat_masters():
            moments = self._adamw.state[flat]
            moments.setdefault("exp_avg", torch.zeros_like(flat))
            moments.setdefault("exp_avg_sq", torch.zeros_like(flat))
            moments["step"] = torch.tensor(float(num_steps))
        if self._stage < 3:
            self._link_moments()
        for name, parameter in self._parameters.items():
            for part in STATE_PARTS:
                self._set(parameter, part, state[f"{part}/{name}"].to(parameter.device))
        if self._stage < 3:
            self._engine.optimizer.update_lp_params()

    def _set(self, parameter: Any, part: str, whole: torch.Tensor) -> None:
        """The inverse of `_gather`. Stage 3 shards parameters, masters and moments alike, equally,
        so that the last shard is padded with zeros."""
        import deepspeed
        from deepspeed import utils

        master, moment = utils.safe_set_full_fp32_param, utils.safe_set_full_optimizer_state
        if self._stage == 3:
            master, moment = utils.safe_set_local_fp32_param, utils.safe_set_local_optimizer_state
            if part == "master":
                with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                    if self._dist.rank == 0:
                        parameter.data.copy_(whole)
            size = parameter.ds_tensor.numel()
            padding = size * self._dist.world_size - whole.numel()
            padded = torch.nn.functional.pad(whole.flatten(), (0, padding))
            whole = padded.narrow(0, size * self._dist.rank, size)
        if part == "master":
            master(parameter, whole)
        else:
            moment(parameter, whole, part)

    def _link_moments(self) -> None:
        """Link parameters to AdamW's state. DeepSpeed itself does this only in its first step, and
        only for the first of several parameter groups."""
        optimizer = self._engine.optimizer
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()


def _import_deepspeed(dist: Dist) -> Any:
    """Import DeepSpeed without its side effects, and join (or create) the process group."""
    on_cpu = dist.device == "cpu"
    backend = "gloo" if on_cpu else "nccl"
    # DeepSpeed moves the module to the CUDA device of this index, whatever `policy.device` says.
    os.environ["LOCAL_RANK"] = dist.device.partition(":")[2] or str(dist.local_rank)
    import deepspeed
    import deepspeed.ops
    from deepspeed.utils import logger

    logger.setLevel(logging.ERROR)
    # DeepSpeed calls collectives by names that torch now deprecates, several times a step.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    if on_cpu:
        # DeepSpeed looks here for a shared-memory op for CPU inference. If it found one, it would
        # compile C++ for a minute, and a stale lock file would hang the run for ever.
        deepspeed.ops.__compatible_ops__ = {}
    else:
        # DeepSpeed's version reads CUDA_VISIBLE_DEVICES as integers, and fails for UUIDs in it.
        accelerator = deepspeed.accelerator.get_accelerator()
        accelerator.available_memory = lambda index=None: torch.cuda.mem_get_info(index)[0]
    if not torch.distributed.is_initialized():
        # DeepSpeed requires a process group; a group of one process needs no port.
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    deepspeed.init_distributed(backend, auto_mpi_discovery=False, verbose=False)
    return deepspeed
