"""The Qwen-Image-Edit render loop against the stock pipelines."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import tiny_editor
import torch
from tiny_editor import TINY, StockParts, make_job, make_renderer, render_stock, three_jobs
from tiny_pictures import make_picture, render_floats
from tiny_rounding import PICTURE_TOL, apart

from rl.api.plugin import Resources
from rl.renderers.diffusion_loop import seeded_noise
from rl.renderers.diffusion_renderer import prepared
from rl.renderers.qwen_image_edit import QwenImageEdit
from rl.renderers.qwen_image_loop import EditorParts, QwenImageLoop, pack


@pytest.fixture(scope="module")
def stock() -> StockParts:
    return tiny_editor.make_stock()


@pytest.fixture(scope="module")
def parts(stock: StockParts) -> EditorParts:
    return stock.ours()


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
    assert apart(render_floats(renderer, jobs), expected) <= PICTURE_TOL


@pytest.mark.slow
def test_the_defaults_equal_the_stock_settings(stock: StockParts, parts: EditorParts) -> None:
    """Uses the real condition size of 1024^2 px for a 3:2 source, and the config's defaults."""
    job = make_job(make_picture(3, 96, 64), 9, noise_seed=3, negative_length=4)
    config = QwenImageEdit.Config(
        type="qwen_image_edit", dtype="float32", num_steps=2, height_px=32, width_px=64
    )
    size = {"height": 32, "width": 64}
    expected = render_stock(
        stock, [job], area_px=1024**2, true_cfg_scale=4.0, num_inference_steps=2, **size
    )
    assert apart(render_floats(QwenImageLoop(config, parts), [job]), expected) <= PICTURE_TOL


@pytest.mark.slow
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

    job = three_jobs()[0]
    embeds = job.payload.embeds
    embeds.copy_(embeds.bfloat16())
    # Stock would draw the noise in bfloat16; ours is drawn in float32 and rounded.
    noise = pack(seeded_noise([job.noise_seed], (4, 8, 8))).bfloat16()
    theirs = render_stock(half, [job], latents=noise)
    half.transformer.float()
    half.vae.float()
    exact = render_stock(half, [job], latents=noise.float())
    ours = render_floats(renderer, [job])
    stock_error, our_error = ((p.float() - exact).abs().mean() for p in (theirs, ours))
    assert 0 < our_error <= 1.1 * stock_error < 0.006


def test_the_schedule_of_eight_steps_at_1024_px_equals_stock(parts: EditorParts) -> None:
    """Values from the stock pipeline; 4096 picture tokens give mu = 0.693."""
    scheduler = prepared(parts.scheduler, 4096, "cpu", sigmas=np.linspace(1, 1 / 8, 8))
    expected = [1.0, 0.916, 0.820, 0.709, 0.580, 0.427, 0.244, 0.02, 0.0]
    np.testing.assert_allclose(scheduler.sigmas.numpy(), expected, atol=6e-4)
