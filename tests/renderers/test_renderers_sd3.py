"""The SD3 render loop against the stock pipeline, and its text encoders."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import tiny_sd3
import torch
from diffusers import StableDiffusion3Pipeline
from tiny_messages import holds
from tiny_pictures import render_floats
from tiny_rounding import PICTURE_TOL, apart
from tiny_sd3 import PROMPTS, TINY, make_job, make_jobs, make_renderer

from rl.renderers import sd3_loop as sd3_text
from rl.renderers.diffusion_loop import seeded_noise
from rl.renderers.sd3_config import Config

LONG_PROMPT = "a very long walk along the sea " * 4
"""124 letters; the tiny tokenizers have one token per letter."""


@pytest.fixture(scope="module")
def parts() -> StableDiffusion3Pipeline:
    return tiny_sd3.make_parts()


@pytest.fixture(scope="module")
def bare(parts: StableDiffusion3Pipeline) -> StableDiffusion3Pipeline:
    """Without the third encoder."""
    return tiny_sd3.stock_pipeline(parts, text_encoder_3=None, tokenizer_3=None)


@pytest.fixture
def counted_encodes(parts: StableDiffusion3Pipeline) -> Iterator[list[int]]:
    """The batch size of every call of the first text encoder."""
    rows: list[int] = []
    encoder = parts.text_encoder
    with encoder.register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0]))):
        yield rows


def render_stock(
    parts: StableDiffusion3Pipeline, prompt: str = PROMPTS[0], latents: Any = None, **changes: Any
) -> torch.Tensor:
    """A picture of the stock pipeline, which draws the noise itself: [1, 3, H, W] in 0..1."""
    config = Config(**TINY | {"guidance_scale": 7.0, "negative_prompt": ""} | changes)
    return tiny_sd3.stock_pipeline(parts)(
        prompt,
        latents=latents,
        generator=torch.Generator().manual_seed(0),
        height=config.height_px,
        width=config.width_px,
        num_inference_steps=config.num_steps,
        guidance_scale=config.guidance_scale,
        negative_prompt=config.negative_prompt,
        max_sequence_length=config.max_t5_tokens,
        output_type="pt",
    ).images


def apart_from_stock(parts: StableDiffusion3Pipeline, **changes: Any) -> float:
    drawn = render_floats(make_renderer(parts, **changes), make_jobs()[:1])
    return apart(drawn, render_stock(parts, **changes))


@pytest.mark.parametrize(
    "changes",
    [{}, {"guidance_scale": 1.0}, {"negative_prompt": "blurry"}, {"height_px": 96, "num_steps": 3}],
)
def test_one_picture_equals_the_stock_pipeline(
    parts: StableDiffusion3Pipeline, changes: dict[str, Any]
) -> None:
    assert apart_from_stock(parts, **changes) <= PICTURE_TOL


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_equals_the_stock_pipeline_up_to_rounding(dtype: torch.dtype) -> None:
    """With equal weights, noise and words, the mean difference is 1 eps."""
    parts = tiny_sd3.make_parts().to(dtype)
    ours = render_floats(make_renderer(parts), make_jobs()[:1])
    parts.to(torch.float32)
    # The stock pipeline draws in half precision; ours draws in float32 and rounds.
    latents = seeded_noise([0], (4, 8, 8)).to(dtype).float()
    expected, other = (render_stock(parts, prompt, latents) for prompt in PROMPTS[:2])
    assert ours.dtype == dtype
    bound = 4 * torch.finfo(dtype).eps
    assert (ours - expected).abs().mean() <= bound < (ours - other).abs().mean() / 4


def test_the_shift_by_picture_size_equals_the_stock_pipeline() -> None:
    parts = tiny_sd3.make_parts({"use_dynamic_shifting": True, "max_shift": 2.0})
    assert apart_from_stock(parts) <= PICTURE_TOL


def test_without_the_third_encoder_it_equals_the_stock_pipeline(
    parts: StableDiffusion3Pipeline, bare: StableDiffusion3Pipeline
) -> None:
    assert apart_from_stock(bare) <= PICTURE_TOL
    assert apart(render_stock(bare), render_stock(parts)) > 0.05


def test_each_prompt_is_encoded_once_and_alone(
    parts: StableDiffusion3Pipeline, counted_encodes: list[int]
) -> None:
    renderer = make_renderer(parts, batch_size=4)
    jobs = [make_job(PROMPTS[index % 2], index) for index in range(6)]
    assert len(dict(renderer.render(jobs))) == 6
    assert counted_encodes == [1, 1, 1]  # two prompts and the negative one
    list(renderer.render(jobs))
    assert len(counted_encodes) == 3


def test_the_negative_prompt_is_not_encoded_without_guidance(
    parts: StableDiffusion3Pipeline, counted_encodes: list[int]
) -> None:
    render_floats(make_renderer(parts, guidance_scale=1.0), make_jobs()[:1])
    assert counted_encodes == [1]


def test_the_encoded_negative_prompt_is_always_kept(
    parts: StableDiffusion3Pipeline, counted_encodes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sd3_text, "NUM_KEPT_PROMPTS", 1)
    list(make_renderer(parts, num_steps=1, batch_size=2).render(make_jobs()))
    assert len(counted_encodes) == 4  # three prompts in two batches, and the negative prompt once


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    messages = [record.getMessage() for record in caplog.records]
    return [message for message in messages if "renderer sd3" in message]


def test_tokens_cut_off_by_clip_are_logged_once_and_counted(
    parts: StableDiffusion3Pipeline, caplog: pytest.LogCaptureFixture
) -> None:
    renderer = make_renderer(parts, num_steps=1, max_t5_tokens=64)
    assert renderer.take_metrics() == {}
    jobs = [make_job(prompt, 0) for prompt in ("a cat", LONG_PROMPT, LONG_PROMPT, "a dog")]
    for _ in range(2):
        list(renderer.render(jobs))
    (warning,) = warnings_of(caplog)
    # The tiny CLIP tokenizer drops the 28 spaces: 96 letters and two markers.
    assert holds(warning, "77 ... CLIP ... 64 (renderer.max_t5_tokens; use_t5 True")
    assert holds(warning, "policy.system_prompt ... sampling.max_completion_tokens")
    assert renderer.take_metrics() == {"clip_cut_share": 0.5, "t5_cut_share": 0.5}
    assert renderer.take_metrics() == {}


@pytest.mark.parametrize(
    ("model", "prompt", "num_cut"),
    [("parts", "b" * 75, 0), ("parts", "b" * 76, 1), ("bare", LONG_PROMPT, 1)],
)
def test_a_prompt_of_77_tokens_fits(
    request: pytest.FixtureRequest, model: str, prompt: str, num_cut: int, caplog
) -> None:
    """The 77 tokens include CLIP's start and end token; also without the third encoder."""
    renderer = make_renderer(request.getfixturevalue(model), num_steps=1, max_t5_tokens=80)
    list(renderer.render([make_job(prompt, 0)]))
    assert len(warnings_of(caplog)) == num_cut
    assert renderer.take_metrics() == {"clip_cut_share": num_cut, "t5_cut_share": 0}
