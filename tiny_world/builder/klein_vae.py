"""Stage klein_vae: trains FLUX.2's autoencoder on flat colours and sharp outlines."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKLFlux2
from PIL import Image

from tiny_world.builder.klein_models import decode, encode, fold, make_vae
from tiny_world.builder.models import to_pictures, to_tensor
from tiny_world.builder.training import autoencoder_loss, fit, sharp_error
from tiny_world.builder.vae import vary
from tiny_world.pixel_judge import grade_likeness, grade_perception
from tiny_world.scenes import draw_array, make_scene

OPTIONS = {"check_every": 500, "weight_decay": 1e-4, "warm_up": 0.04}


def build(work: Path, batch: int = 8) -> None:
    """As `image21_vae`: encoder and decoder learn together, then the decoder alone."""
    torch.manual_seed(0)
    folder = work / "klein_vae"
    if not folder.exists():
        _learn(make_vae(), random.Random(120), folder, batch)
    torch.manual_seed(1)
    _polish(AutoencoderKLFlux2.from_pretrained(folder), random.Random(122), folder, batch)


def _learn(vae, rng: random.Random, folder: Path, batch: int) -> None:
    def loss_of(step: int) -> torch.Tensor:
        return autoencoder_loss(vae, to_tensor(_pictures(rng, batch)))

    fit("klein_vae", vae.parameters(), 3000, 2.5e-3, loss_of, lambda: exam(vae), **OPTIONS)
    with torch.no_grad():  # the pipeline normalises tokens by these statistics
        pictures = to_tensor(_pictures(random.Random(121), 300))
        latents = fold(vae.encode(pictures).latent_dist.mode())
    vae.bn.running_mean.copy_(latents.mean((0, 2, 3)))
    vae.bn.running_var.copy_(latents.var((0, 2, 3)))
    vae.save_pretrained(folder)


def _polish(vae, rng: random.Random, folder: Path, batch: int) -> None:
    """The decoder learns to draw cleanly from noisy tokens, such as an editor's; the tokens of a
    picture do not change."""

    def loss_of(step: int) -> torch.Tensor:
        pictures = _pictures(rng, batch)
        tokens = encode(vae, pictures)
        tokens = tokens + 0.15 * rng.random() * torch.randn_like(tokens)
        return sharp_error(decode(vae, tokens), to_tensor(pictures))

    def check() -> dict[str, float]:
        vae.save_pretrained(folder)
        return exam(vae)

    decoder = [*vae.post_quant_conv.parameters(), *vae.decoder.parameters()]
    fit("klein_decoder", decoder, 2000, 1.2e-3, loss_of, check, **OPTIONS)


def _pictures(rng: random.Random, num: int) -> list[np.ndarray]:
    return [draw_array(vary(make_scene(rng), rng)) for _ in range(num)]


@torch.no_grad()
def exam(vae, num: int = 64, seed: int = 9) -> dict[str, float]:
    """Mean marks of reconstructed pictures, 0-10: likeness to the original, and perception."""
    pictures = _pictures(random.Random(seed), num)
    drawn = [Image.fromarray(p) for p in to_pictures(decode(vae, encode(vae, pictures)))]
    pairs = [
        (Image.fromarray(before), after) for before, after in zip(pictures, drawn, strict=True)
    ]
    marks = {
        "likeness": [grade_likeness(before, after) for before, after in pairs],
        "perception": [min(grade_perception(after)) for after in drawn],
    }
    return {name: round(float(np.mean(values)), 2) for name, values in marks.items()}
