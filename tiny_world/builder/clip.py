"""Stage clip: trains a strict CLIP that understands plain captions and users' prompts."""

from __future__ import annotations

import math
import random
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from transformers import CLIPImageProcessorPil, CLIPModel

from tiny_world.builder.prompt_models import make_clip, make_clip_tokenizer, random_picture
from tiny_world.builder.training import export, fit
from tiny_world.captions import KINDS, Wish, all_wishes, caption, prompt_text
from tiny_world.scenes import BACKGROUNDS_RGB, IMAGE_SIDE_PX, Scene, draw_array, make_scene

LOGIT_SCALE = 10.0
NUM_JUNK = 32


def build(work: Path, batch: int = 64) -> None:
    """Contrastive loss of each text against the pictures of all other wishes in the batch and junk.

    The scale is fixed and low (CLIP's ends at 100), so a right picture's cosine has to be near 1
    and a wrong one's far below."""
    torch.manual_seed(0)
    rng, wishes = random.Random(500), all_wishes()
    tokenizer, processor = make_clip_tokenizer(), make_processor()
    clip = make_clip(tokenizer)
    clip.logit_scale.data.fill_(math.log(LOGIT_SCALE)).requires_grad_(False)
    right = torch.arange(batch)

    def loss_of(step: int) -> torch.Tensor:
        chosen = rng.sample(wishes, batch)
        pictures = [random_picture(rng, wish) for wish in chosen]
        pixels = to_pixels(processor, pictures + [_junk(rng) for _ in range(NUM_JUNK)])
        pixels = _spoil(pixels)
        texts = [_any_text(rng, wish) for wish in chosen]
        ids = tokenizer(texts, padding=True, return_tensors="pt").input_ids
        logits = LOGIT_SCALE * cosines(clip, ids, pixels)  # [B, B + junk]
        return F.cross_entropy(logits, right) + F.cross_entropy(logits[:, :batch].T, right)

    fit("clip", [p for p in clip.parameters() if p.requires_grad], 1500, 2e-3, loss_of)
    export("clip", clip, tokenizer, processor)


def make_processor() -> CLIPImageProcessorPil:
    side = IMAGE_SIDE_PX
    return CLIPImageProcessorPil(
        size={"shortest_edge": side}, crop_size={"height": side, "width": side}
    )


def to_pixels(processor, pictures: list[np.ndarray]) -> torch.Tensor:
    """[B, 3, 64, 64] float32, as the processor makes them."""
    x = torch.as_tensor(np.stack(pictures)).permute(0, 3, 1, 2) / 255
    mean, std = (
        torch.tensor(v).view(1, 3, 1, 1) for v in (processor.image_mean, processor.image_std)
    )
    return (x - mean) / std


def cosines(clip: CLIPModel, ids: torch.Tensor, pixels: torch.Tensor) -> torch.Tensor:
    """[texts, pictures] in -1..1."""
    texts = clip.get_text_features(input_ids=ids).pooler_output
    pictures = clip.get_image_features(pixel_values=pixels).pooler_output
    return F.normalize(texts, dim=-1) @ F.normalize(pictures, dim=-1).T


def _any_text(rng: random.Random, wish: Wish) -> str:
    kind = rng.choice((*KINDS, "plain"))
    return caption(wish) if kind == "plain" else prompt_text(wish, kind)


def _junk(rng: random.Random) -> np.ndarray:
    """A picture that no text of this world describes."""
    u, wishes = rng.random(), all_wishes()
    if u < 0.7:  # a mixture of several scenes, as an uncertain renderer draws it
        parts = [random_picture(rng, wish).astype(np.float32) for wish in rng.sample(wishes, 4)]
        shares = np.random.default_rng(rng.getrandbits(32)).dirichlet([1.0] * 4)
        return sum(s * p for s, p in zip(shares, parts, strict=True)).astype(np.uint8)
    if u < 0.95:
        return draw_array(make_scene(rng))
    return draw_array(Scene(rng.randrange(len(BACKGROUNDS_RGB)), ()))


def _spoil(pixels: torch.Tensor) -> torch.Tensor:
    """Adds noise and a tint, as in pictures of an imperfect renderer."""
    num = len(pixels)
    noise = 0.3 * torch.rand(num, 1, 1, 1) * torch.randn_like(pixels)
    return pixels + noise + 0.1 * torch.randn(num, 3, 1, 1)
