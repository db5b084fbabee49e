"""The Qwen-Image-Edit render loop against the stock pipelines."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import tiny_editor
import torch
from PIL import Image
from tiny_editor import (
    TINY,
    StockParts,
    assert_same_picture,
    make_job,
    make_renderer,
    render_floats,
    render_stock,
    three_jobs,
)
from tiny_pictures import make_picture
from tiny_rounding import PICTURE_TOL

from rl.api.plugin import Resources
from rl.renderers import qwen_image_loop
from rl.renderers.diffusion_loop import seeded_noise
from rl.renderers.diffusion_renderer import SchedulerOverrides, override_scheduler, prepared
from rl.renderers.qwen_image_edit import QwenImageEdit
from rl.renderers.qwen_image_loop import EditorParts


@pytest.fixture(scope="module")
def stock() -> StockParts:
    return tiny_editor.make_stock()


@pytest.fixture(scope="module")
def parts(stock: StockParts) -> EditorParts:
    return stock.ours()


@pytest.fixture
def small_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_editor.use_small_conditions(monkeypatch)


@pytest.mark.usefixtures("small_stock")
@pytest.mark.parametrize("num_jobs", [1, 3])
@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_the_loop_equals_the_stock_pipeline(
    stock: StockParts, parts: EditorParts, num_jobs: int, scale: float
) -> None:
    """The source has 96x32 px for the VAE and the picture 64x48 px, so no two sides are equal."""
    jobs = three_jobs(width=128)[:num_jobs]
    renderer = make_renderer(parts, true_cfg_scale=scale, height_px=48, width_px=64)
    expected = render_stock(stock, jobs, true_cfg_scale=scale, height=48, width=64)
    assert expected.shape == (num_jobs, 3, 48, 64)
    assert (render_floats(renderer, jobs) - expected).abs().max() <= PICTURE_TOL


@pytest.mark.slow
def test_the_defaults_equal_the_stock_settings(stock: StockParts, parts: EditorParts) -> None:
    """Uses the real condition size of 1024^2 px for a 3:2 source, and the config's defaults."""
    job = make_job(make_picture(3, 96, 64), 9, noise_seed=3, negative_length=4)
    config = QwenImageEdit.Config(
        type="qwen_image_edit", dtype="float32", num_steps=2, height_px=32, width_px=64
    )
    ((_, picture),) = qwen_image_loop.QwenImageLoop(config, parts).render([job])
    expected = render_stock(
        stock, [job], true_cfg_scale=4.0, num_inference_steps=2, height=32, width=64
    )
    expected_picture = (expected[0].permute(1, 2, 0).numpy() * 255).round().astype("uint8")
    assert_same_picture(picture, Image.fromarray(expected_picture))


@pytest.mark.slow
@pytest.mark.usefixtures("small_stock")
def test_bfloat16_is_as_close_to_float32_as_stock(tmp_path: Path, stock: StockParts) -> None:
    """Rounding to bfloat16 after every operation changes some pixels by 0.07, in stock and in ours,
    so both are compared with a float32 render of the same weights, noise and words."""
    half = StockParts(
        copy.deepcopy(stock.transformer).bfloat16(),
        copy.deepcopy(stock.vae).bfloat16(),
        stock.scheduler,
    )
    half.save(tmp_path)
    config = QwenImageEdit.Config(**TINY | {"model_path": str(tmp_path), "dtype": "bfloat16"})
    renderer = QwenImageEdit(config, Resources(None, "cpu")).loop
    dtypes = {tensor.dtype for tensor in renderer.parts.vae.state_dict().values()}
    assert dtypes | {renderer.parts.transformer.dtype} == {torch.bfloat16}

    (job,) = three_jobs()[:1]
    noise = qwen_image_loop.pack(seeded_noise([job.noise_seed], (4, 8, 8))).bfloat16()

    def stock_picture(parts: StockParts, dtype: torch.dtype) -> torch.Tensor:
        pipeline = tiny_editor.stock_pipeline(parts)
        return pipeline(
            image=job.sample.source,
            prompt_embeds=job.payload.embeds[None].bfloat16().to(dtype),
            # Stock would draw the noise in bfloat16; ours is drawn in float32 and rounded.
            latents=noise.to(dtype),
            num_inference_steps=4,
            true_cfg_scale=1.0,
            output_type="pt",
        ).images.float()

    theirs = stock_picture(half, torch.bfloat16)
    half.transformer.float()
    half.vae.float()
    exact = stock_picture(half, torch.float32)
    ours = render_floats(renderer, [job]).float()
    stock_error, our_error = ((p - exact).abs().mean() for p in (theirs, ours))
    assert 0 < our_error <= 1.1 * stock_error < 0.006


def test_transparent_and_grey_sources_are_read_as_rgb(parts: EditorParts) -> None:
    grey = make_picture(0).convert("L")
    renderer = make_renderer(parts, num_steps=2)
    jobs = [make_job(grey.convert(mode), 9, noise_seed=0) for mode in ("L", "RGBA", "RGB")]
    first, second, third = (picture for _, picture in renderer.render(jobs))
    assert_same_picture(first, third)
    assert_same_picture(second, third)


def test_guidance_of_a_hand_computed_example() -> None:
    """(1.5, 4) + 3 * ((3, 4) - (1.5, 4)) = (6, 4), scaled from norm sqrt(52) to |(3, 4)| = 5."""
    positive = torch.tensor([[[3.0, 4.0]]])
    negative = torch.tensor([[[1.5, 4.0]]])
    expected = torch.tensor([[[6.0, 4.0]]]) * 5 / 52**0.5
    torch.testing.assert_close(qwen_image_loop.guide(positive, negative, 3.0), expected)


def test_the_schedule_of_eight_steps_at_1024_px_equals_stock(parts: EditorParts) -> None:
    """Values from the stock pipeline; 4096 picture tokens give mu = 0.693."""
    scheduler = prepared(parts.scheduler, 4096, "cpu", sigmas=np.linspace(1, 1 / 8, 8))
    expected = [1.0, 0.916, 0.820, 0.709, 0.580, 0.427, 0.244, 0.02, 0.0]
    np.testing.assert_allclose(scheduler.sigmas.numpy(), expected, atol=6e-4)


def test_scheduler_overrides_replace_the_checkpoint_keys(parts: EditorParts) -> None:
    lightning = SchedulerOverrides(base_shift=np.log(3), max_shift=np.log(3), shift_terminal=None)
    overridden = override_scheduler(parts.scheduler, lightning)
    scheduler = prepared(overridden, 4096, "cpu", sigmas=np.linspace(1, 1 / 4, 4))
    # shift 3: sigma -> 3 s / (1 + 2 s) at s = 1, 3/4, 1/2, 1/4
    np.testing.assert_allclose(scheduler.sigmas.numpy(), [1, 0.9, 0.75, 0.5, 0], atol=1e-6)
    assert parts.scheduler.config.shift_terminal == 0.02
