"""Stage emu3_vq: an Emu3VQVAE whose codes are those of `tiny_world/token_scenes.py`.

The codebook starts out legible (colour, background, form and quarter are its axes) and is then
trained with the decoder, codes in and drawn scenes out. The encoder follows: it is taught to come
closer to the right code than to any other. So an unchanged part of a picture keeps its codes under
every edit, which a codebook learnt without names would not promise.
Rounded to fp16 it goes to `tiny_world/weights/emu3_vq`.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from transformers import Emu3VQVAE, Emu3VQVAEConfig

from tiny_world.builder.export import WEIGHTS
from tiny_world.builder.models import to_pictures, to_tensor
from tiny_world.pixel_judge import grade_perception, grade_semantics
from tiny_world.scenes import (
    BACKGROUNDS_RGB,
    COLOURS,
    IMAGE_SIDE_PX,
    RGB,
    SHAPES,
    Scene,
    apply,
    draw_array,
    make_instruction,
)
from tiny_world.token_scenes import NUM_CODES, code_of, encode, make_centred_scene

FORM_AXES = {"circle": (1.0, 0.0), "square": (-0.5, 0.87), "triangle": (-0.5, -0.87)}
QUARTER_AXES = ((-1.0, -1.0), (-1.0, 1.0), (1.0, -1.0), (1.0, 1.0))


def build(work: Path, draw: int = 700, read: int = 600, batch: int = 12) -> None:
    torch.manual_seed(0)
    vq, rng = make_vq(), random.Random(300)
    decoder = [*vq.quantize.parameters(), *vq.post_quant_conv.parameters()]
    _train(vq, [*decoder, *vq.decoder.parameters()], _drawing_loss, rng, draw, batch)
    print(f"emu3_vq: mark of the right edit, decoded {ceiling(vq):.2f}", flush=True)
    reader = [*vq.encoder.parameters(), *vq.quant_conv.parameters()]
    _train(vq, reader, _reading_loss, rng, read, batch)
    print(f"emu3_vq: codes read right {accuracy(vq):.4f}", flush=True)
    vq.half().save_pretrained(WEIGHTS / "emu3_vq")


def make_vq() -> Emu3VQVAE:
    """16x down, no time: a 64x64 picture becomes 4x4 codes of 8 numbers each."""
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
    vq.quantize.embedding.weight.data.copy_(_legible_codebook())
    vq.decoder.conv_out.weight.data.mul_(0.02)  # the stock initialisation paints far beyond white
    return vq


def _legible_codebook() -> torch.Tensor:
    """[NUM_CODES, 8]: colour of the shape (3), background (1), form (2), quarter (2)."""
    codebook = torch.zeros(NUM_CODES, 8)
    for background, grey in enumerate(BACKGROUNDS_RGB):
        codebook[background, :4] = torch.tensor([*_axis(grey), background - 1.0])
        for shape in SHAPES:
            for colour in COLOURS:
                for quarter, place in enumerate(QUARTER_AXES):
                    axes = (*_axis(RGB[colour]), background - 1.0, *FORM_AXES[shape], *place)
                    row = code_of(background, shape, colour, quarter)
                    codebook[row] = torch.tensor(axes)
    return codebook


def _axis(rgb: tuple[int, int, int]) -> list[float]:
    return [2 * (value / 127.5 - 1) for value in rgb]


def _train(vq: Emu3VQVAE, parameters, loss_of, rng: random.Random, steps: int, batch: int) -> None:
    optimizer = torch.optim.AdamW(parameters, 3e-3, (0.9, 0.98), weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, steps, pct_start=0.05)
    total = 0.0
    for step in range(1, steps + 1):
        loss = loss_of(vq, [vary(make_centred_scene(rng), rng) for _ in range(batch)])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        total += loss.item()
        if step % 50 == 0:
            print(f"{loss_of.__name__} {step} {total / 50:.4f}", flush=True)
            total = 0.0


def vary(scene: Scene, rng: random.Random) -> Scene:
    """What edits and mistakes can lead to: fewer shapes, colours and forms that occur twice."""
    shapes = [s for s in scene.shapes if rng.random() < 0.9]
    if rng.random() < 0.5:
        shapes = [replace(s, colour=rng.choice(COLOURS)) for s in shapes]
    return replace(scene, shapes=tuple(shapes))


def _drawing_loss(vq: Emu3VQVAE, scenes: list[Scene]) -> torch.Tensor:
    """The fourth power speaks up for outlines, which are few pixels and large errors."""
    error = (vq.decode(_codes(scenes)) - to_tensor([draw_array(s) for s in scenes])).abs()
    return (error + 2 * error**2 + 2 * error**4).mean()


def _reading_loss(vq: Emu3VQVAE, scenes: list[Scene]) -> torch.Tensor:
    """Cross-entropy over the codes by their squared distance, and that distance itself."""
    x = to_tensor([draw_array(s) for s in scenes])[:, None]
    latents = vq.quant_conv(vq.encoder(x).permute(0, 2, 1, 3, 4))[:, :, 0].permute(0, 2, 3, 1)
    latents, codes = latents.flatten(0, 2), _codes(scenes).flatten()
    codebook = vq.quantize.embedding.weight.detach()
    closeness = -(torch.cdist(latents, codebook) ** 2)
    return F.cross_entropy(4 * closeness, codes) + F.mse_loss(latents, codebook[codes])


def _codes(scenes: list[Scene]) -> torch.Tensor:
    """[B, 4, 4] int64."""
    return torch.as_tensor(np.stack([encode(s) for s in scenes])).long()


@torch.no_grad()
def decode(vq: Emu3VQVAE, codes: np.ndarray) -> list[Image.Image]:
    """[B, 4, 4] codes to pictures."""
    pixels = to_pictures(vq.decode(torch.as_tensor(codes).long()))
    return [Image.fromarray(picture) for picture in pixels]


@torch.no_grad()
def accuracy(vq: Emu3VQVAE, num: int = 100) -> float:
    """Share of codes the encoder reads as `token_scenes.encode` has them."""
    rng = random.Random(8)
    scenes = [vary(make_centred_scene(rng), rng) for _ in range(num)]
    x = to_tensor([draw_array(s) for s in scenes])
    read = vq.encode(x, image_sizes=[(IMAGE_SIDE_PX, IMAGE_SIDE_PX)] * num).image_tokens
    return (torch.stack(read) == _codes(scenes)).float().mean().item()


def ceiling(vq: Emu3VQVAE, num: int = 60) -> float:
    """The mark of the right edit when source and edit are both decoded from codes, 0-10."""
    rng, marks = random.Random(7), []
    for _ in range(num):
        scene = make_centred_scene(rng)
        task = make_instruction(rng, scene)
        source, edited = decode(vq, np.stack([encode(scene), encode(apply(scene, task.op))]))
        try:
            semantics = min(grade_semantics(source, edited, task.instruction))
        except ValueError:
            semantics = 0.0
        marks.append(math.sqrt(semantics * min(grade_perception(edited))))
    return float(np.mean(marks))
