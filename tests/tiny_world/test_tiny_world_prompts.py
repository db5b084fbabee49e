"""The tiny weights for prompt enhancement (renderer, CLIP and rewriter) work."""

from __future__ import annotations

from dataclasses import replace
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
def pictures() -> dict[str, list[Any]]:
    """Pictures that the shipped config renders from plain captions and from users' prompts."""
    from rl.api.types import RenderJob, Sample
    from rl.renderers import sd3

    section = load_config(REPO / "configs/tiny_prompts.jsonnet").renderer
    renderer = sd3.SD3(sd3.Config.model_validate(section), Resources(None, "cpu"))

    def drawn(texts: list[str]) -> list[Any]:
        jobs = [RenderJob(Sample(id="", instruction=""), text, i) for i, text in enumerate(texts)]
        outcomes = dict(renderer.render(jobs))
        return [outcomes[i] for i in range(len(jobs))]

    return {
        "plain": drawn([captions.caption(prompt.wish) for prompt in PROMPTS]),
        "users": drawn([prompt.text for prompt in PROMPTS]),
    }


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

    next_of = dict(zip(COLOURS, [*COLOURS[1:], COLOURS[0]], strict=True))
    wishes = [prompt.wish for prompt in PROMPTS]
    others = [replace(wish, colour=next_of[wish.colour]) for wish in wishes]
    right, wrong = (
        cosines([draw(captions.scene_of(wish)) for wish in each]) for each in (wishes, others)
    )
    assert min(right) > 0.9 and fmean(wrong) < 0.45 and max(wrong) < 0.7
    assert fmean(cosines(pictures["plain"])) > 0.8
    assert fmean(cosines(pictures["users"])) < 0.4


@pytest.mark.slow
@pytest.mark.parametrize("held_out", [False, True])
def test_the_untrained_rewriter_writes_the_right_caption_sometimes(held_out: bool) -> None:
    from transformers import AutoTokenizer

    from tiny_world.builder.models import load_policy
    from tiny_world.builder.rewriter import p_right

    folder = WEIGHTS / "rewriter"
    p_by_kind = p_right(load_policy(folder), AutoTokenizer.from_pretrained(folder), held_out)
    assert all(0.02 < p < 0.4 for p in p_by_kind.values()), p_by_kind
