"""The SD3 render loop against the stock pipeline, and its text encoders."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import tiny_sd3
import torch
from diffusers import StableDiffusion3Pipeline
from tiny_messages import holds
from tiny_rounding import PICTURE_TOL, apart
from tiny_sd3 import PROMPTS, make_job, make_jobs, make_renderer, render_floats

from rl.renderers import sd3_loop as sd3_text
from rl.renderers.diffusion_loop import seeded_noise

LONG_PROMPT = "a very long walk along the sea " * 4
"""124 letters; the tiny tokenizers have one token per letter."""


@pytest.fixture(scope="module")
def parts() -> StableDiffusion3Pipeline:
    return tiny_sd3.make_parts()


@pytest.fixture
def counted_encodes(parts: StableDiffusion3Pipeline) -> Iterator[list[int]]:
    """The batch size of every call of the first text encoder."""
    rows: list[int] = []
    handle = parts.text_encoder.register_forward_pre_hook(
        lambda _module, inputs: rows.append(len(inputs[0]))
    )
    yield rows
    handle.remove()


def render_stock(
    parts: StableDiffusion3Pipeline, prompts: tuple[str, ...], seeds: list[int], **arguments: object
) -> torch.Tensor:
    """Pictures of the stock pipeline, which draws the noise itself: [B, 3, H, W] in 0..1."""
    settings: dict[str, object] = {
        "height": 64,
        "width": 64,
        "num_inference_steps": 4,
        "guidance_scale": 7.0,
        "max_sequence_length": 32,
        "output_type": "pt",
    }
    return tiny_sd3.stock_pipeline(parts)(
        list(prompts),
        generator=[torch.Generator().manual_seed(seed) for seed in seeds],
        **{**settings, **arguments},
    ).images


@pytest.mark.parametrize(
    ("stock", "ours"),
    [
        ({}, {}),
        ({"guidance_scale": 1.0}, {"guidance_scale": 1.0}),
        ({"negative_prompt": "blurry"}, {"negative_prompt": "blurry"}),
        ({"height": 96, "num_inference_steps": 3}, {"height_px": 96, "num_steps": 3}),
    ],
)
def test_one_picture_equals_the_stock_pipeline(
    parts: StableDiffusion3Pipeline, stock: dict[str, object], ours: dict[str, object]
) -> None:
    expected = render_stock(parts, PROMPTS[:1], [0], **stock)
    drawn = render_floats(make_renderer(parts, **ours), make_jobs()[:1])
    assert apart(drawn, expected) <= PICTURE_TOL


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_equals_the_stock_pipeline_up_to_rounding(dtype: torch.dtype) -> None:
    """With equal weights, noise and words, the mean difference is 1 eps."""
    parts = tiny_sd3.make_parts()
    modules = (
        parts.transformer,
        parts.vae,
        parts.text_encoder,
        parts.text_encoder_2,
        parts.text_encoder_3,
    )
    for module in modules:
        module.to(dtype)
    ours = render_floats(make_renderer(parts), make_jobs()[:1])
    for module in modules:
        module.float()
    # The stock pipeline draws in half precision; ours draws in float32 and rounds.
    latents = seeded_noise([0], (4, 8, 8)).to(dtype).float()
    expected, other = (render_stock(parts, (p,), [0], latents=latents) for p in PROMPTS[:2])
    assert ours.dtype == dtype
    bound = 4 * torch.finfo(dtype).eps
    assert (ours - expected).abs().mean() <= bound < (ours - other).abs().mean() / 4


def test_the_shift_by_picture_size_equals_the_stock_pipeline() -> None:
    parts = tiny_sd3.make_parts({"use_dynamic_shifting": True, "max_shift": 2.0})
    expected = render_stock(parts, PROMPTS[:1], [0])
    ours = make_renderer(parts)
    assert apart(render_floats(ours, make_jobs()[:1]), expected) <= PICTURE_TOL


def test_without_the_third_encoder_it_equals_the_stock_pipeline(
    parts: StableDiffusion3Pipeline,
) -> None:
    bare = tiny_sd3.stock_pipeline(parts, text_encoder_3=None, tokenizer_3=None)
    expected = render_stock(bare, PROMPTS[:1], [0])
    assert apart(render_floats(make_renderer(bare), make_jobs()[:1]), expected) <= PICTURE_TOL
    assert (expected - render_stock(parts, PROMPTS[:1], [0])).abs().max() > 0.05


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
    renderer = make_renderer(parts, num_steps=1, batch_size=2)
    list(renderer.render(make_jobs()))
    assert len(counted_encodes) == 4  # three prompts in two batches, and the negative prompt once


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    messages = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return [message for message in messages if "renderer sd3" in message]


def test_tokens_cut_off_by_clip_are_logged_once_and_counted(
    parts: StableDiffusion3Pipeline, caplog
) -> None:
    renderer = make_renderer(parts, num_steps=1, max_t5_tokens=64)
    assert renderer.take_metrics() == {}
    jobs = [make_job(prompt, 0) for prompt in ("a cat", LONG_PROMPT, LONG_PROMPT, "a dog")]
    list(renderer.render(jobs))
    list(renderer.render(jobs))
    (warning,) = warnings_of(caplog)
    # The tiny CLIP tokenizer drops the 28 spaces: 96 letters and two markers.
    assert holds(
        warning,
        "more tokens than the 77 that CLIP reads ... 64 (renderer.max_t5_tokens; use_t5 True",
    )
    assert holds(warning, "policy.system_prompt ... sampling.max_completion_tokens")
    stats = renderer.take_metrics()
    assert stats == {"clip_cut_share": 0.5, "t5_cut_share": 0.5}
    assert renderer.take_metrics() == {}


@pytest.mark.parametrize(("letters", "num_cut"), [(75, 0), (76, 1)])
def test_a_prompt_of_77_tokens_fits(
    parts: StableDiffusion3Pipeline, letters: int, num_cut: int, caplog
) -> None:
    """The 77 tokens include CLIP's start and end token."""
    renderer = make_renderer(parts, num_steps=1, max_t5_tokens=80)
    list(renderer.render([make_job("b" * letters, 0)]))
    assert len(warnings_of(caplog)) == num_cut
    assert renderer.take_metrics()["clip_cut_share"] == num_cut


def test_without_the_third_encoder_a_cut_prompt_is_logged_too(
    parts: StableDiffusion3Pipeline, caplog
) -> None:
    bare = tiny_sd3.stock_pipeline(parts, text_encoder_3=None, tokenizer_3=None)
    renderer = make_renderer(bare, num_steps=1)
    list(renderer.render([make_job(LONG_PROMPT, 0)]))
    assert len(warnings_of(caplog)) == 1
    assert renderer.take_metrics()["t5_cut_share"] == 0
