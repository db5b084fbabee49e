"""Stage sd3: teach Stable Diffusion 3's transformer and text encoders the plain captions.

Flow matching in latents, x_t = (1 - t) x_0 + t noise, velocity = noise - x_0. The text encoders
learn along with the transformer, so they know the words of plain captions. The words of users'
prompts come up as well, scattered over captions at random: that teaches that they say nothing, and
the picture maker fills in what it was not told, as the large ones do.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL
from PIL import Image

from tiny_world.builder.models import to_tensor
from tiny_world.builder.policy import make_optimizer, take_step
from tiny_world.builder.prompt_models import (
    LATENT_CHANNELS,
    LATENT_SIDE,
    MAX_TEXT_TOKENS,
    condition,
    make_clip_tokenizer,
    make_text_encoder,
    make_transformer,
    random_picture,
    render,
    token_ids,
)
from tiny_world.captions import Wish, all_wishes, caption, prompt_text, user_prompts
from tiny_world.pixel_judge import grade_wish

PICTURES_PER_WISH = 24
SHARE_AT_1 = 0.25
"""Of the examples trained at t = 1, from which every picture starts, 0..1."""
SHORT_TOKENS, SHARE_SHORT = 16, 0.92
"""Until this share of the steps texts are padded to fewer tokens than CLIP's 77: three times as
fast, and soon unlearnt."""
USER_WORDS = sorted(
    {word for half in (False, True) for p in user_prompts(half) for word in p.text.split()}
    - {word for wish in all_wishes() for word in caption(wish).split()}
)


def build(work: Path, steps: int = 6000, batch: int = 32) -> None:
    torch.manual_seed(1)
    rng, wishes = random.Random(600), all_wishes()
    vae = AutoencoderKL.from_pretrained(work / "sd3_vae").eval().requires_grad_(False)
    latents = _encode(vae, rng, wishes)
    tokenizer = make_clip_tokenizer()
    encoders = [make_text_encoder(tokenizer) for _ in range(2)]
    transformer = make_transformer()
    parts = {"transformer": transformer, "text_encoder": encoders[0], "text_encoder_2": encoders[1]}
    learning = [parameter for part in parts.values() for parameter in part.parameters()]
    optimizer, schedule = make_optimizer(learning, steps, 2e-3)
    total = 0.0
    for step in range(1, steps + 1):
        chosen = [rng.randrange(len(wishes)) for _ in range(batch)]
        x0 = torch.stack([latents[i, rng.randrange(PICTURES_PER_WISH)] for i in chosen])
        texts = [_words(rng, wishes[i]) for i in chosen]
        length = SHORT_TOKENS if step < SHARE_SHORT * steps else MAX_TEXT_TOKENS
        ids = token_ids(tokenizer, texts, length)
        loss = _flow_loss(transformer, x0, *condition(encoders, ids))
        take_step(loss, learning, optimizer, schedule)
        total += loss.item()
        if step % 100 == 0:
            print(f"sd3 {step} loss {total / 100:.4f}", flush=True)
            total = 0.0
        if step % 2000 == 0 or step == steps:
            print(f"sd3 {step} {exam(transformer, encoders, tokenizer, vae, length)}", flush=True)
            for name, part in parts.items():
                part.save_pretrained(work / "sd3" / name)


@torch.no_grad()
def _encode(vae, rng: random.Random, wishes: list[Wish]) -> torch.Tensor:
    """[wishes, PICTURES_PER_WISH, C, 8, 8] latents, normalised as the pipeline does it."""
    rows = []
    for wish in wishes:
        pictures = to_tensor([random_picture(rng, wish) for _ in range(PICTURES_PER_WISH)])
        rows.append(vae.encode(pictures).latent_dist.mode())
    return (torch.stack(rows) - vae.config.shift_factor) * vae.config.scaling_factor


def _words(rng: random.Random, wish: Wish) -> str:
    """The plain caption four times out of five, else one with holes, or none at all."""
    u, words = rng.random(), caption(wish).split()
    if u < 0.8:
        return " ".join(words)
    if u < 0.83:
        return ""
    kept = [word if rng.random() < 0.5 else rng.choice(USER_WORDS) for word in words]
    for _ in range(rng.randrange(8)):
        kept.insert(rng.randint(0, len(kept)), rng.choice(USER_WORDS))
    return " ".join(kept)


def _flow_loss(transformer, x0, states, pooled) -> torch.Tensor:
    """Squared velocity error, weighted (t + 0.05)^2: at small t it is mostly noise."""
    num = len(x0)
    u = torch.rand(num)
    t = torch.where(torch.rand(num) < SHARE_AT_1, torch.ones(num), 3 * u / (1 + 2 * u))
    noise, width = torch.randn_like(x0), t.view(-1, 1, 1, 1)
    velocity = transformer(
        hidden_states=x0 + width * (noise - x0),
        timestep=1000 * t,
        encoder_hidden_states=states,
        pooled_projections=pooled,
        return_dict=False,
    )[0]
    return ((velocity - (noise - x0)) * (width + 0.05)).square().mean()


@torch.no_grad()
def exam(transformer, encoders, tokenizer, vae, length: int) -> dict[str, float]:
    """Mean mark (0-10) of how well pictures show what was meant: from plain captions at several
    numbers of steps, and from users' prompts at 6; texts padded to `length` tokens."""
    wishes = all_wishes()
    plain = [caption(wish) for wish in wishes]
    users = [prompt_text(wish, "noun") for wish in wishes]
    seeded = torch.Generator().manual_seed(1)
    noise = torch.randn(len(wishes), LATENT_CHANNELS, LATENT_SIDE, LATENT_SIDE, generator=seeded)
    marks = {}
    for name, texts, steps in (("plain", plain, 4), ("plain", plain, 6), ("users", users, 6)):
        given = condition(encoders, token_ids(tokenizer, texts, length))
        pictures = [Image.fromarray(p) for p in render(transformer, vae, *given, noise, steps)]
        grades = [grade_wish(p, user) for p, user in zip(pictures, users, strict=True)]
        marks[f"{name}_{steps}"] = round(float(np.mean(grades)), 2)
    return marks
