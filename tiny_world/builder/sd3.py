"""Stage sd3: trains Stable Diffusion 3's transformer and text encoders on plain captions.

The text encoders learn with the transformer, so they know the words of plain captions. Words of
users' prompts are inserted into captions at random: so they carry no information, and the renderer
fills in what the caption lacks, as large ones do.
"""

from __future__ import annotations

import random
from pathlib import Path

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler

from tiny_world.builder.models import to_tensor
from tiny_world.builder.prompt_models import (
    MAX_TEXT_TOKENS,
    SCHEDULER,
    condition,
    make_clip_tokenizer,
    make_text_encoder,
    make_transformer,
    random_picture,
    token_ids,
)
from tiny_world.builder.training import export, fit, flow_loss
from tiny_world.captions import Wish, all_wishes, caption, user_prompts

PICTURES_PER_WISH = 24
SHORT_TOKENS, SHARE_SHORT = 16, 0.92
"""Texts are padded to SHORT_TOKENS instead of CLIP's 77 for this share of the steps, which is three
times as fast; the last steps adapt to the real padding."""
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

    def loss_of(step: int) -> torch.Tensor:
        chosen = [rng.randrange(len(wishes)) for _ in range(batch)]
        x0 = torch.stack([latents[i, rng.randrange(PICTURES_PER_WISH)] for i in chosen])
        texts = [_text(rng, wishes[i]) for i in chosen]
        length = SHORT_TOKENS if step < SHARE_SHORT * steps else MAX_TEXT_TOKENS
        states, pooled = condition(encoders, token_ids(tokenizer, texts, length))

        def velocity_of(xt: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            return transformer(
                hidden_states=xt,
                timestep=1000 * t,
                encoder_hidden_states=states,
                pooled_projections=pooled,
                return_dict=False,
            )[0]

        return flow_loss(velocity_of, x0, share_at_1=0.25, skew=2)

    learning = [p for part in (transformer, *encoders) for p in part.parameters()]
    fit("sd3", learning, steps, 2e-3, loss_of)
    parts = {"vae": vae, "transformer": transformer}
    parts |= {"text_encoder": encoders[0], "text_encoder_2": encoders[1]}
    parts |= {name: make_clip_tokenizer() for name in ("tokenizer", "tokenizer_2")}
    parts["scheduler"] = FlowMatchEulerDiscreteScheduler(**SCHEDULER)
    for name, part in parts.items():
        export(f"sd3/{name}", part)


@torch.no_grad()
def _encode(vae, rng: random.Random, wishes: list[Wish]) -> torch.Tensor:
    """[wishes, PICTURES_PER_WISH, C, 8, 8] latents, normalised as the pipeline does it."""
    rows = []
    for wish in wishes:
        pictures = to_tensor([random_picture(rng, wish) for _ in range(PICTURES_PER_WISH)])
        rows.append(vae.encode(pictures).latent_dist.mode())
    return (torch.stack(rows) - vae.config.shift_factor) * vae.config.scaling_factor


def _text(rng: random.Random, wish: Wish) -> str:
    """The plain caption four times out of five, else a corrupted or an empty one."""
    u, words = rng.random(), caption(wish).split()
    if u < 0.8:
        return " ".join(words)
    if u < 0.83:
        return ""
    kept = [word if rng.random() < 0.5 else rng.choice(USER_WORDS) for word in words]
    for _ in range(rng.randrange(8)):
        kept.insert(rng.randint(0, len(kept)), rng.choice(USER_WORDS))
    return " ".join(kept)
