"""Qwen-Image-2.1's forward and sampling over rows of unequal length.

Legend: B rows, L positions of the policy's states, K source pictures of a row, S positions of the
prompt and its sources together, C latent channels, D width.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from tiny_world.builder.image21_models import LATENT_SIDE, NUM_PADS, decode
from tiny_world.builder.models import denoised

LATENTS = LATENT_SIDE**2


@dataclass(frozen=True)
class Condition:
    """The renderer's input; every row has the same number of source pictures."""

    states: torch.Tensor
    """[B, L, HIDDEN] of the policy, before its final norm."""
    visible: torch.Tensor
    """[B, L] bool, False on padding and on positions hidden from the editor."""
    lengths: torch.Tensor
    """[B] positions before the padding."""
    is_image: torch.Tensor
    """[L] bool, True on the source pictures' slots."""
    sources: torch.Tensor
    """[B, K, 16, C] latents."""


def velocity(transformer, xt: torch.Tensor, t: torch.Tensor, condition: Condition) -> torch.Tensor:
    """Velocities [B, 16, C] of the noisy latents xt [B, 16, C] at times t [B], 0..1. Each row's
    latents have their own position; the pipeline's forward would count padding into it."""
    x, is_image, visible = _prompt(transformer, condition)
    num_prompt = x.shape[1]
    x = torch.cat([x, transformer.img_in(xt)], 1)
    rotary = _rotary(transformer, condition, is_image)
    mask = _mask(is_image, visible)
    embedded = transformer.time_text_embed(torch.cat([t, t.new_zeros(1)]), x)

    def by_position(by_time: torch.Tensor) -> torch.Tensor:
        """[B + 1, W], whose last row is of t = 0, to [B, S + 16, W]."""
        target = by_time[:-1, None].expand(-1, LATENTS, -1)
        return torch.cat([by_time[-1].expand(len(x), num_prompt, -1), target], 1)

    modulation = by_position(transformer.modulation(embedded))
    for block in transformer.transformer_blocks:
        x = _block(block, x, modulation, rotary, mask)
    out = transformer.norm_out
    scale = by_position(out.linear(out.silu(embedded)))[:, num_prompt:]
    x = out.norm(x[:, num_prompt:]) * (1 + scale)
    return transformer.proj_out(x)


def _prompt(transformer, condition: Condition) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """([B, S, D] with the sources in their slots, [S] bool on sources, [B, S] bool visible)."""
    repeats = torch.where(condition.is_image, LATENTS // NUM_PADS, 1)
    x = transformer.txt_in(condition.states).repeat_interleave(repeats, 1)
    is_image = condition.is_image.repeat_interleave(repeats)
    x[:, is_image] = transformer.img_in(condition.sources).flatten(1, 2)
    return x, is_image, condition.visible.repeat_interleave(repeats, 1) | is_image


def _rotary(transformer, condition: Condition, is_image: torch.Tensor) -> torch.Tensor:
    """[B, S + 16, head size / 2] complex."""
    num_sources = condition.sources.shape[1]
    shape = (1, LATENT_SIDE, LATENT_SIDE)
    is_latent = F.pad(is_image, (0, LATENTS), value=True)
    row = transformer.pos_embed([shape] * (num_sources + 1), is_latent, is_image.device)
    frames = condition.lengths - num_sources * (NUM_PADS - LATENT_SIDE)
    target = row[-LATENTS:].repeat(len(frames), 1, 1)
    by_frame = transformer.pos_embed.freqs[0]
    target[..., : by_frame.shape[1]] = by_frame[frames][:, None]
    return torch.cat([row[:-LATENTS].expand(len(frames), -1, -1), target], 1)


def _mask(is_image: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """[B, 1, S + 16, S + 16] bool, True where a query (row) sees a key (column)."""
    is_image = F.pad(is_image, (0, LATENTS), value=True)
    picture = torch.where(is_image, (is_image.cumsum(0) - 1) // LATENTS, -1)
    same = (picture[:, None] == picture) & is_image
    allowed = same | torch.ones_like(same).tril()
    keys = F.pad(visible, (0, LATENTS), value=True)
    # Hidden positions of the prompt attend to themselves, as their softmax needs one key.
    itself = torch.eye(len(picture), dtype=torch.bool)
    return (allowed & keys[:, None] | itself)[:, None]


def _block(block, x, modulation, rotary, mask) -> torch.Tensor:
    scale_1, gate_1, scale_2, gate_2 = modulation.chunk(4, -1)
    attention, normed = block.attn, block.img_norm1(x) * (1 + scale_1)
    query, key, value = (
        project(normed).unflatten(-1, (attention.heads, -1))
        for project in (attention.to_q, attention.to_k, attention.to_v)
    )
    query, key = (
        _rotate(norm(part), rotary)
        for norm, part in ((attention.norm_q, query), (attention.norm_k, key))
    )
    attended = F.scaled_dot_product_attention(
        *(part.transpose(1, 2) for part in (query, key, value)), attn_mask=mask
    )
    x = x + gate_1.tanh() * attention.to_out[0](attended.transpose(1, 2).flatten(2))
    return x + gate_2.tanh() * block.img_mlp(block.img_norm2(x) * (1 + scale_2))


def _rotate(x: torch.Tensor, rotary: torch.Tensor) -> torch.Tensor:
    """Rotates [B, S, heads, head size] by [B, S, head size / 2] complex."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotary[:, :, None]).flatten(3)


@torch.no_grad()
def render(transformer, vae, condition: Condition, noise: torch.Tensor, steps: int) -> np.ndarray:
    """[B, 64, 64, 3] uint8 by Euler sampling without guidance, as QwenImage21Pipeline does it;
    noise [B, 16, C]."""
    tokens = denoised(noise, steps, lambda x, t: velocity(transformer, x, t, condition))
    return decode(vae, tokens)
