"""The tiny weights for prompt enhancement (renderer, CLIP and rewriter) work."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import pytest
from tiny_config import REPO, WEIGHTS

from rl.api.plugin import Resources
from rl.config.schema import load_config
from tiny_world import captions
from tiny_world.pixel_judge import grade_wish
from tiny_world.scenes import COLOURS, draw

PROMPTS = captions.user_prompts(held_out=True)[::3]


@pytest.fixture(scope="module")
def config() -> Any:
    return load_config(str(REPO / "configs" / "tiny_prompts.jsonnet"))


@pytest.fixture(scope="module")
def pictures(config: Any) -> dict[str, list[Any]]:
    """Pictures that the shipped config renders from plain captions and from users' prompts."""
    from rl.api.types import RenderJob, Sample
    from rl.renderers import sd3

    section = sd3.Config.model_validate(config.renderer)
    renderer = sd3.SD3(section, Resources(None, "cpu"))
    pictures = {}
    for name, texts in (
        ("plain", [captions.caption(prompt.wish) for prompt in PROMPTS]),
        ("users", [prompt.text for prompt in PROMPTS]),
    ):
        jobs = [RenderJob(Sample(id="", instruction=""), text, i) for i, text in enumerate(texts)]
        pictures[name] = [drawn for _, drawn in sorted(renderer.render(jobs), key=lambda r: r[0])]
    return pictures


@pytest.mark.slow
def test_the_renderer_understands_only_plain_captions(pictures: dict[str, list[Any]]) -> None:
    marks = {
        name: fmean(grade_wish(p, prompt.text) for p, prompt in zip(drawn, PROMPTS, strict=True))
        for name, drawn in pictures.items()
    }
    assert marks["plain"] > 7 and marks["users"] < 2, marks


@pytest.mark.slow
def test_clip_tells_right_pictures_from_wrong_ones(pictures: dict[str, list[Any]]) -> None:
    import torch
    from transformers import CLIPImageProcessorPil, CLIPModel, CLIPTokenizer

    clip = CLIPModel.from_pretrained(WEIGHTS / "clip", dtype=torch.float32).eval()
    tokenizer = CLIPTokenizer.from_pretrained(WEIGHTS / "clip")
    processor = CLIPImageProcessorPil.from_pretrained(WEIGHTS / "clip")

    def cosines(images: list[Any]) -> list[float]:
        texts = tokenizer([p.text for p in PROMPTS], padding=True, return_tensors="pt")
        pixels = processor(images, return_tensors="pt").pixel_values
        with torch.no_grad():
            output = clip(input_ids=texts.input_ids, pixel_values=pixels)
        return [float(x) for x in output.logits_per_image.diag() / clip.logit_scale.exp()]

    right = cosines([draw(captions.scene_of(prompt.wish)) for prompt in PROMPTS])
    wrong_colour = cosines([draw(captions.scene_of(recoloured(p.wish))) for p in PROMPTS])
    assert min(right) > 0.9 and fmean(wrong_colour) < 0.45 and max(wrong_colour) < 0.7
    assert fmean(cosines(pictures["plain"])) > 0.8
    assert fmean(cosines(pictures["users"])) < 0.4


def recoloured(wish: captions.Wish) -> captions.Wish:
    colour = COLOURS[(COLOURS.index(wish.colour) + 1) % len(COLOURS)]
    return captions.Wish(colour, wish.shape, wish.cell)


@pytest.mark.slow
def test_the_untrained_rewriter_writes_the_right_caption_sometimes(config: Any) -> None:
    assert config.policy["system_prompt"] == captions.SYSTEM_PROMPT
    from transformers import AutoTokenizer

    from tiny_world.builder.models import load_policy
    from tiny_world.builder.rewriter import p_right

    policy = load_policy(WEIGHTS / "rewriter")
    tokenizer = AutoTokenizer.from_pretrained(WEIGHTS / "rewriter")
    for held_out in (False, True):
        p_by_kind = p_right(policy, tokenizer, held_out)
        assert all(0.02 < p < 0.4 for p in p_by_kind.values()), p_by_kind
