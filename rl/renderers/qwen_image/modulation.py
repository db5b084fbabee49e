"""Computes the transformer's modulation once per schedule; its weights stay in host memory.

Legend: T steps of a schedule; P parts of the image tokens with their own modulation: 1, or 2 with
`zero_cond_t` (Edit-2511), where the source's tokens are modulated as at timestep 0; D the
transformer's width.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from cachetools import LRUCache, cachedmethod

from rl.renderers.qwen_image.denoising_config import MODULATIONS

BUFFER_BYTES = 10**9
NUM_KEPT_SCHEDULES = 32
"""Tables cached in host memory, one per picture size: 4.4 MB per step in bfloat16."""


@dataclass(frozen=True, eq=False)
class StepModulation:
    """The modulation of one step: shift, scale and gate of attention, then those of the MLP. Scales
    include the added 1, so that scales and shifts are the weights and biases of a layer norm."""

    image: torch.Tensor
    """[blocks, P, 6, D], for image tokens."""
    text: torch.Tensor
    """[blocks, 1, 6, D], for text tokens."""
    out: torch.Tensor
    """[2, D]: shift and scale before the last projection."""

    def to(self, device: Any) -> StepModulation:
        """Without a wait for the GPU's earlier work."""
        parts = (self.image, self.text, self.out)
        return StepModulation(*(part.to(device, non_blocking=True) for part in parts))


class ModulationTables:
    """The tables of one transformer, each computed when its schedule is first used.

    A third of the parameters (6.8 of 20.4 B, `img_mod` and `txt_mod` of every block) depend only
    on the timestep: they run once per schedule, which saves 13.6 GB on the device in bfloat16.
    """

    def __init__(self, transformer: Any) -> None:
        self._transformer = transformer
        self._tables: LRUCache[Hashable, list[StepModulation]] = LRUCache(NUM_KEPT_SCHEDULES)

    @cachedmethod(lambda self: self._tables, lambda self, timesteps_T: tuple(timesteps_T.tolist()))
    def of_schedule(self, timesteps_T: torch.Tensor) -> list[StepModulation]:
        return build_table(self._transformer, timesteps_T)


@torch.no_grad()
def build_table(transformer: Any, timesteps_T: torch.Tensor) -> list[StepModulation]:
    """The modulation of all blocks at every step of a schedule, in host memory; `timesteps_T`:
    the scheduler's, 1000 down to 0.

    Computes on the device, as the stock forward does, so that the results are equal. The weights,
    13.6 GB, go there through one buffer.
    """
    device, dtype, num_steps = transformer.device, transformer.dtype, len(timesteps_T)
    # The stock pipeline rounds the timestep to the latents' dtype before dividing.
    fractions = timesteps_T.to(device, dtype) / 1000
    if transformer.config.zero_cond_t:
        fractions = torch.cat([fractions, fractions.new_zeros(1)])
    embedding = transformer.time_text_embed(fractions, torch.empty(0, dtype=dtype, device=device))
    activated = F.silu(embedding)

    def run(weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """Apply a block's linear layer: [T, 6, D], with `zero_cond_t` one row more; scales + 1."""
        rows = F.linear(activated, weight, bias).unflatten(-1, (6, -1))
        rows[:, 1] += 1  # the scales; indexing by a list would make the host wait
        rows[:, 4] += 1
        return rows

    def by_part(rows: torch.Tensor) -> torch.Tensor:
        """[T, P, 6, D]"""
        parts = [rows[:num_steps]]
        if transformer.config.zero_cond_t:
            parts.append(rows[num_steps:].expand_as(parts[0]))
        return torch.stack(parts, dim=1)

    blocks = transformer.transformer_blocks
    layers = [getattr(block, name)[1] for block in blocks for name in ("img_mod", "txt_mod")]
    weights = on_device([part for layer in layers for part in (layer.weight, layer.bias)], device)
    rows = [run(weight, bias) for weight, bias in zip(weights, weights, strict=True)]
    image = torch.stack([by_part(of_block) for of_block in rows[::2]], dim=1)
    text = torch.stack([of_block[:num_steps, None] for of_block in rows[1::2]], dim=1)
    scale, shift = transformer.norm_out.linear(activated[:num_steps]).chunk(2, dim=-1)
    out = torch.stack([shift, 1 + scale], dim=1)
    return [StepModulation(*step) for step in zip(image.cpu(), text.cpu(), out.cpu(), strict=True)]


def on_device(tensors: Sequence[torch.Tensor], device: torch.device) -> Iterator[torch.Tensor]:
    """CPU tensors of one dtype, in order, copied to the device through one page-locked buffer of
    BUFFER_BYTES, so that the host waits once for each filling instead of for each tensor."""
    total, largest = (f(tensor.numel() for tensor in tensors) for f in (sum, max))
    num_values = max(largest, min(total, BUFFER_BYTES // tensors[0].element_size()))
    buffer = torch.empty(num_values, dtype=tensors[0].dtype)
    if device.type == "cuda":
        buffer = buffer.pin_memory()
    remaining = deque(tensors)
    while remaining:
        copies, end = [], 0
        while remaining and end + remaining[0].numel() <= num_values:
            tensor = remaining.popleft()
            part = buffer[end : end + tensor.numel()].view(tensor.shape).copy_(tensor)
            copies.append(part.to(device, non_blocking=True, copy=True))
            end += tensor.numel()
        yield from copies
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the buffer is filled again


def move_without_modulation(transformer: Any, device: str) -> None:
    """Move everything but the modulation, which stays in host memory. Where it is unchanged from
    the checkpoint, it stays memory-mapped from the file, shared by all ranks of a machine."""
    for name, child in transformer.named_children():
        if name != "transformer_blocks":
            child.to(device)
    for block in transformer.transformer_blocks:
        for name, child in block.named_children():
            if name not in MODULATIONS:
                child.to(device)
