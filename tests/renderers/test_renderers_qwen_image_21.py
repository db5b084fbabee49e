"""The Qwen-Image-2.1 render loop against the stock pipeline, and batches against single jobs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import tiny_editor
import tiny_qwen_image_21 as tiny
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.modular_pipelines.qwenimage21 import QwenImage21TurboAutoBlocks
from PIL import Image
from tiny_messages import holds
from tiny_pictures import make_picture, render_alone, render_floats
from tiny_qwen_image_21 import (
    StockParts,
    make_group,
    make_job,
    make_renderer,
    references,
    render_stock,
)
from tiny_rounding import PICTURE_TOL, apart

from rl.api.plugin import Resources
from rl.api.types import HiddenStates, RenderJob
from rl.renderers.diffusion_renderer import INDEX
from rl.renderers.qwen_image_21 import QwenImage21
from rl.renderers.qwen_image_21_config import SIGMAS, Config
from rl.renderers.qwen_image_21_loop import QwenImage21Loop, in_groups
from rl.renderers.qwen_image_loop import EditorParts as Parts
from rl.renderers.qwen_image_loop import FrameVae, PictureVae

GUIDED = 10 * PICTURE_TOL
"""A guidance of 3 multiplies rounding differences, and the random weights of the next step multiply
them again: 1.6e-4 was measured, and 4e-6 without guidance."""


@pytest.fixture(scope="module")
def stock() -> StockParts:
    return tiny.make_stock()


@pytest.fixture(scope="module")
def parts(stock: StockParts) -> Parts:
    return stock.ours()


@pytest.mark.parametrize("number", [0, 1, 3])
def test_a_group_equals_the_stock_pipeline_on_one_prompt_at_a_time(
    stock: StockParts, parts: Parts, number: int
) -> None:
    """Three prompts of different length with the same sources."""
    jobs = make_group(tiny.WORDS, references(number))
    expected = render_stock(stock, jobs)
    assert apart(render_floats(make_renderer(parts), jobs), expected) <= PICTURE_TOL
    assert apart(expected[0], expected[1]) > 0.1


@pytest.mark.parametrize("number", [0, 2])
def test_guidance_equals_the_stock_pipeline(stock: StockParts, parts: Parts, number: int) -> None:
    jobs = make_group(tiny.WORDS[:2], references(number), 7, negative="blurry")
    expected = render_stock(stock, jobs, true_cfg_scale=3.0, negative_prompt="blurry")
    guided, unguided = (make_renderer(parts, true_cfg_scale=scale) for scale in (3.0, 1.0))
    assert apart(render_floats(guided, jobs), expected) <= GUIDED
    assert apart(render_floats(unguided, jobs), expected) > 0.1


def test_transparent_sources_are_read_as_by_stock(stock: StockParts, parts: Parts) -> None:
    """The encoder gets them on white, the VAE with four channels."""
    clear = make_picture(0).convert("RGBA")
    clear.putalpha(make_picture(1).convert("L"))
    job, opaque = (make_job(sources=[source]) for source in (clear, clear.convert("RGB")))
    expected = render_stock(stock, [job])
    renderer = make_renderer(parts)
    assert apart(render_floats(renderer, [job]), expected) <= PICTURE_TOL
    assert apart(render_floats(renderer, [opaque]), expected) > 0.01


def test_a_drawn_picture_is_placed_on_white(parts: Parts) -> None:
    job, renderer = make_job(), make_renderer(parts)
    ((_, picture),) = renderer.render([job])
    (drawn,) = render_floats(renderer, [job])
    colour, alpha = drawn[:3], drawn[3:]
    expected = (colour * alpha + (1 - alpha)).permute(1, 2, 0).numpy() * 255
    assert picture.mode == "RGB"
    assert float(alpha.std()) > 0.01
    assert np.abs(np.asarray(picture) - expected).max() <= 2  # two roundings to 8 bits


def test_the_sigmas_of_a_few_step_checkpoint_are_used(stock: StockParts, parts: Parts) -> None:
    jobs, levels = [make_job()], [1.0, 0.8, 0.3]
    ours = render_floats(make_renderer(replace(parts, sigmas=levels), num_steps=3), jobs)
    assert apart(ours, render_stock(stock, jobs, sigmas=levels)) <= PICTURE_TOL


TURBO = (1.0, 0.978453, 0.95418, 0.926626, 0.89508, 0.845148, 0.704534, 0.414568)
"""Noise levels of Qwen-Image-2.1-Turbo, whose scheduler shifts none of them."""


@pytest.mark.parametrize("number", [0, 2])
def test_the_folder_of_turbo_is_drawn_as_by_diffusers_own_blocks(
    stock: StockParts, tmp_path: Path, number: int
) -> None:
    turbo = replace(stock, scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0))
    turbo.save(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({SIGMAS: TURBO}))
    config = Config(**tiny.TINY | {"model_path": str(tmp_path), "num_steps": len(TURBO)})
    loop = QwenImage21(config, Resources(None, "cpu")).loop
    assert torch.equal(loop._prepared_scheduler(4096).sigmas, torch.tensor([*TURBO, 0.0]))
    blocks = QwenImage21TurboAutoBlocks().init_pipeline()
    encoder, processor = tiny.make_encoder()
    blocks.update_components(text_encoder=encoder, processor=processor, **vars(turbo))
    blocks.register_to_config(sample_sigmas=TURBO)
    [job] = jobs = make_group(tiny.WORDS[:1], references(number), 3)
    expected = blocks(
        prompt=job.sample.instruction,
        generator=torch.Generator().manual_seed(job.noise_seed),
        output_resolution=tiny.SIDE_PX,
        output_type="pt",
        output="images",
        **({"image": list(job.sample.sources)} if number else {}),
    )
    assert apart(render_floats(loop, jobs), expected) <= PICTURE_TOL


def sizes_of_groups(renderer: QwenImage21Loop, jobs: Sequence[RenderJob]) -> list[int]:
    """How many pictures are drawn together at a time; they equal those drawn alone."""
    with patch.object(renderer, "_draw", wraps=renderer._draw) as draw:
        together = render_floats(renderer, jobs)
    assert apart(together, render_alone(renderer, jobs)) <= PICTURE_TOL
    return [len(call.args[0]) for call in draw.call_args_list]


def test_rows_whose_prompts_differ_slightly_do_not_share_a_start(parts: Parts) -> None:
    """Adapters of two versions would differ like this; the pictures remain correct."""
    jobs = make_group(tiny.WORDS, references(1))
    payload: HiddenStates = jobs[1].payload
    payload.embeds[payload.pictures[0].start - 1, 0] += 1
    assert sizes_of_groups(make_renderer(parts), jobs) == [1, 1, 1]


def test_the_sources_of_a_group_are_processed_once(parts: Parts) -> None:
    """The keys of the sources that a step reads are as many for eight rows as for one."""
    renderer = make_renderer(parts)
    jobs = make_group([tiny.WORDS[i % 3] for i in range(8)], references(2))
    rows = [renderer._rows(job) for job in jobs]
    [(_, group)] = in_groups(jobs, rows)
    prepared = renderer._denoiser.prepare([row for row, *_ in group], (8, 4))
    first = rows[0][0].start_len
    start = first + 3 * sum(len(span) for span in jobs[0].payload.pictures)
    assert {len(part) for layer in prepared.shared for part in layer} == {start}
    num_rest = sum(len(job.payload.embeds) - first for job in jobs)
    assert {len(layer[0]) for layer in prepared.rest} == {num_rest}


def test_the_groups_of_a_batch_are_drawn_one_after_the_other(parts: Parts) -> None:
    """The keys of one group's sources at a time are held, as the memory plan assumes."""
    first, second = references(2)
    jobs = [*make_group(tiny.WORDS[:2], [first]), make_job(tiny.WORDS[2], [second])]
    assert sizes_of_groups(make_renderer(parts, height_px=64, width_px=96), jobs) == [2, 1]


def test_pictures_whose_size_differs_from_the_vaes_are_refused(parts: Parts) -> None:
    job = make_job(sources=references(1))
    blind = replace(job, payload=replace(job.payload, pictures=()))
    for refused, area_px, message in (
        (job, 128 * 128, r"4 tokens.* 15 .*condition_area_px"),
        (blind, 64 * 64, "no tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            list(make_renderer(parts, condition_area_px=area_px).render([refused]))


def test_too_long_a_row_is_blamed_on_the_policy(parts: Parts) -> None:
    rooms = [torch.randn(8192 - 4 + more, tiny.STATE_DIM) for more in (0, 1)]
    jobs = [replace(make_job(), payload=HiddenStates(states)) for states in rooms]
    outcomes = dict(make_renderer(parts, num_steps=1).render(jobs))
    assert isinstance(outcomes[0], Image.Image), "the longest row that is allowed"
    assert holds(outcomes[1], "too_long: 8193 ... 8192 ... blame='policy'")


@pytest.mark.parametrize(
    ("make_vae", "ours", "channels"),
    [
        (lambda: tiny_editor.make_stock().vae, FrameVae, 3),
        (tiny.make_vae, PictureVae, 4),
        (partial(tiny.make_vae, patched=True), PictureVae, 4),
    ],
    ids=["edit", "2.1", "patched"],
)
@torch.no_grad()
def test_the_vae_equals_diffusers(make_vae: Any, ours: type[FrameVae], channels: int) -> None:
    """Some VAEs first fold patches of pixels into channels."""
    pixels = torch.rand(2, channels, 64, 96) * 2 - 1
    vae = make_vae()
    mean, std = (
        torch.tensor(vae.config[f"latents_{name}"]).view(1, -1, 1, 1) for name in ("mean", "std")
    )
    mode = vae.encode(pixels.unsqueeze(2)).latent_dist.mode()
    decoded = vae.decode(mode).sample
    expected = (mode.squeeze(2) - mean) / std
    frames = ours(vae)
    assert apart(frames.encode(pixels), expected) <= PICTURE_TOL
    assert apart(frames.decode(expected), decoded.squeeze(2)) <= PICTURE_TOL
