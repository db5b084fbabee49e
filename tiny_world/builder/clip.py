"""Stage clip: a CLIP that knows plain captions and users' prompts alike, and marks strictly.

Contrastive, every text against the pictures of all other wishes in the batch and against junk:
two scenes melted into one, several shapes, none. The temperature is fixed and mild (CLIP's own
ends at 100), so that a right picture's cosine has to be near 1 and a wrong one's far below, not
merely lower.
"""

from __future__ import annotations

import math
import random
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from transformers import CLIPImageProcessorPil, CLIPModel

from tiny_world.builder.policy import make_optimizer, take_step
from tiny_world.builder.prompt_models import make_clip, make_clip_tokenizer, random_picture
from tiny_world.captions import KINDS, Wish, all_wishes, caption, prompt_text
from tiny_world.scenes import BACKGROUNDS_RGB, IMAGE_SIDE_PX, Scene, draw_array, make_scene

LOGIT_SCALE = 10.0
NUM_JUNK = 32


def build(work: Path, steps: int = 1500, batch: int = 64) -> None:
    torch.manual_seed(0)
    rng, wishes = random.Random(500), all_wishes()
    tokenizer = make_clip_tokenizer()
    processor = make_processor()
    clip = make_clip(tokenizer)
    clip.logit_scale.data.fill_(math.log(LOGIT_SCALE)).requires_grad_(False)
    learning = [p for p in clip.parameters() if p.requires_grad]
    optimizer, schedule = make_optimizer(learning, steps, 2e-3)
    total = 0.0
    for step in range(1, steps + 1):
        wanted = rng.sample(wishes, batch)
        pictures = [random_picture(rng, wish) for wish in wanted]
        pixels = to_pixels(processor, pictures + [_junk(rng) for _ in range(NUM_JUNK)])
        pixels = _spoil(pixels)
        texts = [_any_words(rng, wish) for wish in wanted]
        logits = LOGIT_SCALE * cosines(
            clip, tokenizer(texts, padding=True, return_tensors="pt").input_ids, pixels
        )  # [B, B + junk]
        right = torch.arange(batch)
        loss = F.cross_entropy(logits, right) + F.cross_entropy(logits[:, :batch].T, right)
        take_step(loss, learning, optimizer, schedule)
        total += loss.item()
        if step % 100 == 0:
            print(f"clip {step} loss {total / 100:.4f}", flush=True)
            total = 0.0
        if step % 500 == 0 or step == steps:
            print(f"clip {step} {exam(clip.eval(), tokenizer, processor)}", flush=True)
            clip.train()
    clip.save_pretrained(work / "clip")
    tokenizer.save_pretrained(work / "clip")
    processor.save_pretrained(work / "clip")


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


def _any_words(rng: random.Random, wish: Wish) -> str:
    kind = rng.choice((*KINDS, "plain"))
    return caption(wish) if kind == "plain" else prompt_text(wish, kind)


def _junk(rng: random.Random) -> np.ndarray:
    """A picture that no text of this world describes."""
    u, wishes = rng.random(), all_wishes()
    if u < 0.7:  # several scenes melted into one: what a picture maker in doubt paints
        parts = [random_picture(rng, wish).astype(np.float32) for wish in rng.sample(wishes, 4)]
        shares = np.random.default_rng(rng.getrandbits(32)).dirichlet([1.0] * 4)
        return sum(s * p for s, p in zip(shares, parts, strict=True)).astype(np.uint8)
    if u < 0.95:
        return draw_array(make_scene(rng))
    return draw_array(Scene(rng.randrange(len(BACKGROUNDS_RGB)), ()))


def _spoil(pixels: torch.Tensor) -> torch.Tensor:
    """Noise and a shade of colour, as an imperfect picture maker would leave them."""
    num = len(pixels)
    noise = 0.3 * torch.rand(num, 1, 1, 1) * torch.randn_like(pixels)
    return pixels + noise + 0.1 * torch.randn(num, 3, 1, 1)


@torch.no_grad()
def exam(clip: CLIPModel, tokenizer, processor, num: int = 400) -> dict[str, float]:
    """Mean and worst-case cosine of users' prompts with pictures by number of wrong attributes."""
    rng, wishes = random.Random(11), all_wishes()
    by_wrong: dict[str, list[float]] = {}
    wanted = [rng.choice(wishes) for _ in range(num)]
    texts = [prompt_text(wish, rng.choice(KINDS)) for wish in wanted]
    shown = [rng.choice((w, _neighbour(rng, w), rng.choice(wishes))) for w in wanted]
    pixels = to_pixels(processor, [random_picture(rng, wish) for wish in shown])
    ids = tokenizer(texts, padding=True, return_tensors="pt").input_ids
    for a, b, cosine in zip(wanted, shown, cosines(clip, ids, pixels).diag().tolist(), strict=True):
        wrong = (a.colour != b.colour) + (a.shape != b.shape) + (a.cell != b.cell)
        by_wrong.setdefault(f"{wrong} wrong", []).append(cosine)
    junk = to_pixels(processor, [_junk(rng) for _ in range(num)])
    by_wrong["junk"] = cosines(clip, ids, junk).diag().tolist()
    quantiles = {name: np.quantile(v, (0.02, 0.5, 0.98)).round(2) for name, v in by_wrong.items()}
    return {name: quantiles[name].tolist() for name in sorted(quantiles)}


def _neighbour(rng: random.Random, wish: Wish) -> Wish:
    """A wish that differs in one attribute."""
    while True:
        other = rng.choice(all_wishes())
        same = (other.colour == wish.colour, other.shape == wish.shape, other.cell == wish.cell)
        if sum(same) == 2:
            return other
