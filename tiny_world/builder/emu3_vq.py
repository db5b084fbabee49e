"""Stage emu3_vq: trains an Emu3VQVAE whose codes are those of `tiny_world/token_scenes.py`."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import Emu3VQVAE, Emu3VQVAEConfig

from tiny_world.builder.models import to_tensor
from tiny_world.builder.training import export, fit, sharp_error
from tiny_world.scenes import BACKGROUNDS_RGB, COLOURS, RGB, SHAPES, Scene, draw_array
from tiny_world.token_scenes import NUM_CODES, code_of, encode, make_centred_scene

FORM_AXES = {"circle": (1.0, 0.0), "square": (-0.5, 0.87), "triangle": (-0.5, -0.87)}
QUARTER_AXES = ((-1.0, -1.0), (-1.0, 1.0), (1.0, -1.0), (1.0, 1.0))


def build(work: Path, batch: int = 12) -> None:
    """The codebook starts with colour, background, form and quarter as its axes and is trained with
    the decoder; then the encoder learns the right codes. So an edit never changes the codes of
    unchanged parts, which a freely learnt codebook would not guarantee."""
    torch.manual_seed(0)
    vq, rng = make_vq(), random.Random(300)

    def scenes() -> list[Scene]:
        return [vary(make_centred_scene(rng), rng) for _ in range(batch)]

    drawing = nn.ModuleList([vq.quantize, vq.post_quant_conv, vq.decoder]).parameters()
    reading = nn.ModuleList([vq.encoder, vq.quant_conv]).parameters()
    fit("draw", drawing, 700, 3e-3, lambda _: _drawing_loss(vq, scenes()), weight_decay=1e-4)
    fit("read", reading, 600, 3e-3, lambda _: _reading_loss(vq, scenes()), weight_decay=1e-4)
    export("emu3_vq", vq)


def make_vq() -> Emu3VQVAE:
    """Downsamples 16x in space, 1x in time: a 64x64 picture becomes 4x4 codes of 8 numbers."""
    vq = Emu3VQVAE(
        Emu3VQVAEConfig(
            codebook_size=NUM_CODES,
            embed_dim=8,
            latent_channels=8,
            temporal_downsample_factor=1,
            base_channels=32,
            channel_multiplier=[1, 1, 1, 1, 1],
            num_res_blocks=1,
            attn_resolutions=[4],
            hidden_size=32,
        )
    )
    vq.quantize.embedding.weight.data.copy_(_initial_codebook())
    vq.decoder.conv_out.weight.data.mul_(0.02)  # the default is far out of range
    return vq


def _initial_codebook() -> torch.Tensor:
    """[NUM_CODES, 8]: colour of the shape (3), background (1), form (2), quarter (2)."""
    codebook = torch.zeros(NUM_CODES, 8)
    for background, grey in enumerate(BACKGROUNDS_RGB):
        codebook[background, :4] = torch.tensor([*_axis(grey), background - 1.0])
        for shape in SHAPES:
            for colour in COLOURS:
                for quarter, corner in enumerate(QUARTER_AXES):
                    axes = (*_axis(RGB[colour]), background - 1.0, *FORM_AXES[shape], *corner)
                    row = code_of(background, shape, colour, quarter)
                    codebook[row] = torch.tensor(axes)
    return codebook


def _axis(rgb: tuple[int, int, int]) -> list[float]:
    return [2 * (value / 127.5 - 1) for value in rgb]


def vary(scene: Scene, rng: random.Random) -> Scene:
    """Drops shapes and changes colours at random, as edits and wrong edits do."""
    shapes = [s for s in scene.shapes if rng.random() < 0.9]
    if rng.random() < 0.5:
        shapes = [replace(s, colour=rng.choice(COLOURS)) for s in shapes]
    return replace(scene, shapes=tuple(shapes))


def _drawing_loss(vq: Emu3VQVAE, scenes: list[Scene]) -> torch.Tensor:
    return sharp_error(vq.decode(_codes(scenes)), to_tensor([draw_array(s) for s in scenes]))


def _reading_loss(vq: Emu3VQVAE, scenes: list[Scene]) -> torch.Tensor:
    """Cross-entropy with logits -4 * squared distance, plus the error to the right code."""
    x = to_tensor([draw_array(s) for s in scenes])[:, None]
    latents = vq.quant_conv(vq.encoder(x).permute(0, 2, 1, 3, 4))[:, :, 0].permute(0, 2, 3, 1)
    latents, codes = latents.flatten(0, 2), _codes(scenes).flatten()
    codebook = vq.quantize.embedding.weight.detach()
    closeness = -(torch.cdist(latents, codebook) ** 2)
    return F.cross_entropy(4 * closeness, codes) + F.mse_loss(latents, codebook[codes])


def _codes(scenes: list[Scene]) -> torch.Tensor:
    """[B, 4, 4] int64."""
    return torch.as_tensor(np.stack([encode(s) for s in scenes])).long()
