"""Stage image21_vae: trains Qwen-Image-2.1's autoencoder on flat colours and sharp outlines."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKLQwenImage21
from PIL import Image

from tiny_world.builder.image21_models import (
    LATENT_SIDE,
    decode,
    encode,
    latent_stats,
    make_vae,
    to_rgba,
)
from tiny_world.builder.training import autoencoder_loss, fit, sharp_error
from tiny_world.builder.vae import vary
from tiny_world.pixel_judge import grade_likeness, grade_perception
from tiny_world.scenes import draw_array, make_scene


def build(work: Path, batch: int = 8) -> None:
    """Encoder and decoder learn together; then only the decoder learns to draw cleanly from noisy
    latents, such as an editor's. The latents of a picture do not change in that phase."""
    torch.manual_seed(0)
    rng, folder = random.Random(110), work / "image21_vae"
    if not folder.exists():
        _learn(make_vae(), rng, folder, batch)
    _polish(AutoencoderKLQwenImage21.from_pretrained(folder), rng, folder, batch)


def _learn(vae, rng: random.Random, folder: Path, batch: int) -> None:
    def loss_of(step: int) -> torch.Tensor:
        return autoencoder_loss(vae, to_rgba(_pictures(rng, batch)))

    def check() -> dict[str, float]:
        return exam(vae)

    options = {"check_every": 300, "weight_decay": 1e-4, "warm_up": 0.04}
    fit("image21_vae", vae.parameters(), 1800, 2.5e-3, loss_of, check, **options)
    with torch.no_grad():  # the pipeline normalises latents by these statistics
        latents = vae.encode(to_rgba(_pictures(rng, 300))).latent_dist.mode()[:, :, 0]
    mean, std = latents.mean((0, 2, 3)).tolist(), latents.std((0, 2, 3)).tolist()
    vae.register_to_config(latents_mean=mean, latents_std=std)
    vae.save_pretrained(folder)


def _polish(vae, rng: random.Random, folder: Path, batch: int) -> None:
    mean, std = (part[:, :, None] for part in latent_stats(vae))

    def loss_of(step: int) -> torch.Tensor:
        pictures = _pictures(rng, batch)
        latents = encode(vae, pictures).transpose(1, 2).unflatten(2, (LATENT_SIDE, LATENT_SIDE))
        latents = latents + 0.15 * rng.random() * torch.randn_like(latents)
        decoded = vae.decode(latents[:, :, None] * std + mean).sample
        return sharp_error(decoded, to_rgba(pictures))

    def check() -> dict[str, float]:
        vae.save_pretrained(folder)
        return exam(vae)

    decoder = [*vae.post_quant_conv.parameters(), *vae.decoder.parameters()]
    options = {"check_every": 500, "weight_decay": 1e-4, "warm_up": 0.04}
    for _ in range(2):
        fit("image21_decoder", decoder, 1500, 1.2e-3, loss_of, check, **options)


def _pictures(rng: random.Random, num: int) -> list[np.ndarray]:
    return [draw_array(vary(make_scene(rng), rng)) for _ in range(num)]


def exam(vae, num: int = 64, seed: int = 9) -> dict[str, float]:
    """Mean marks of reconstructed pictures, 0-10: likeness to the original, and perception."""
    pictures = _pictures(random.Random(seed), num)
    pairs = [
        (Image.fromarray(before), Image.fromarray(after))
        for before, after in zip(pictures, decode(vae, encode(vae, pictures)), strict=True)
    ]
    marks = {
        "likeness": [grade_likeness(before, after) for before, after in pairs],
        "perception": [min(grade_perception(after)) for _, after in pairs],
    }
    return {name: round(float(np.mean(values)), 2) for name, values in marks.items()}
