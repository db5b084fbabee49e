"""The Qwen-Image-2.1 render loop against the stock pipeline, and batches against single jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tiny_qwen_image_21 as tiny
import torch
from PIL import Image
from tiny_messages import holds
from tiny_pictures import make_picture
from tiny_qwen_image_21 import (
    StockParts,
    make_group,
    make_job,
    make_renderer,
    references,
    render_floats,
)
from tiny_rounding import PICTURE_TOL

from rl.api.types import HiddenStates, RenderFailure, RenderJob
from rl.renderers.qwen_image_21_loop import QwenImage21Loop, in_groups
from rl.renderers.qwen_image_loop import EditorParts as Parts
from rl.renderers.qwen_image_loop import PictureVae

GUIDED = 10 * PICTURE_TOL
"""A guidance of 3 multiplies rounding differences, and the random weights of the next step multiply
them again: 1.6e-4 was measured, and 4e-6 without guidance."""


@pytest.fixture(scope="module")
def stock() -> StockParts:
    return tiny.make_stock()


@pytest.fixture(scope="module")
def parts(stock: StockParts) -> Parts:
    return stock.ours()


def three_prompts() -> list[RenderJob]:
    """Jobs with prompts of different length, two of them with the same picture."""
    first, second = references(2)
    return [*make_group(tiny.WORDS[:2], [first]), make_job(tiny.WORDS[2], [second], 2)]


def alone(renderer: QwenImage21Loop, jobs: Sequence[RenderJob]) -> torch.Tensor:
    return torch.cat([render_floats(renderer, [job]) for job in jobs])


@pytest.mark.parametrize("number", [0, 1, 3])
def test_a_group_equals_the_stock_pipeline_on_one_prompt_at_a_time(
    stock: StockParts, parts: Parts, number: int
) -> None:
    """Three prompts of different length with the same sources. The stock pipeline draws them one by
    one, because its own batches differ by 0.4."""
    sources = references(number)
    jobs = make_group(tiny.WORDS, sources)
    expected = torch.cat(
        [tiny.render_stock(stock, job.sample.instruction, sources, job.noise_seed) for job in jobs]
    )
    ours = render_floats(make_renderer(parts), jobs)
    assert ours.shape == expected.shape
    assert (ours - expected).abs().max() <= PICTURE_TOL
    assert (expected[0] - expected[1]).abs().max() > 0.1


@pytest.mark.parametrize("number", [0, 2])
def test_guidance_equals_the_stock_pipeline(stock: StockParts, parts: Parts, number: int) -> None:
    sources = references(number)
    jobs = make_group(tiny.WORDS[:2], sources, 7, negative="blurry")
    guided = {"true_cfg_scale": 3.0, "negative_prompt": "blurry"}
    expected = torch.cat(
        [
            tiny.render_stock(stock, job.sample.instruction, sources, job.noise_seed, **guided)
            for job in jobs
        ]
    )
    renderer = make_renderer(parts, true_cfg_scale=3.0)
    assert (render_floats(renderer, jobs) - expected).abs().max() <= GUIDED
    unguided = render_floats(make_renderer(parts), jobs)
    assert (unguided - expected).abs().max() > 0.1


def test_transparent_sources_are_read_as_by_stock(stock: StockParts, parts: Parts) -> None:
    """The encoder gets them on white, the VAE with four channels."""
    clear = make_picture(0).convert("RGBA")
    clear.putalpha(make_picture(1).convert("L"))
    expected = tiny.render_stock(stock, tiny.WORDS[0], [clear], 3)
    ours = render_floats(make_renderer(parts), [make_job(tiny.WORDS[0], [clear], 3)])
    assert (ours - expected).abs().max() <= PICTURE_TOL
    opaque = make_job(tiny.WORDS[0], [clear.convert("RGB")], 3)
    assert (render_floats(make_renderer(parts), [opaque]) - expected).abs().max() > 0.01


def test_a_drawn_picture_is_placed_on_white(parts: Parts) -> None:
    job = make_job(tiny.WORDS[0], [], 3)
    renderer = make_renderer(parts)
    ((_, picture),) = renderer.render([job])
    (drawn,) = render_floats(renderer, [job])
    colour, alpha = drawn[:3], drawn[3:]
    expected = (colour * alpha + (1 - alpha)).permute(1, 2, 0).numpy() * 255
    assert isinstance(picture, Image.Image)
    assert picture.mode == "RGB"
    assert float(alpha.std()) > 0.01
    assert np.abs(np.asarray(picture) - expected).max() <= 2  # two roundings to 8 bits


def test_the_sigmas_of_a_few_step_checkpoint_are_used(stock: StockParts, parts: Parts) -> None:
    levels = (1.0, 0.8, 0.3)
    expected = tiny.render_stock(stock, tiny.WORDS[0], [], 3, sigmas=list(levels))
    renderer = make_renderer(replace(parts, sigmas=levels), num_steps=3)
    ours = render_floats(renderer, [make_job(tiny.WORDS[0], [], 3)])
    assert (ours - expected).abs().max() <= PICTURE_TOL


def record_parts(renderer: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many pictures each later pass of sources through the transformer is for."""
    sizes: list[int] = []
    draw = renderer._draw

    def recording_draw(jobs: Sequence[RenderJob], *args: object) -> torch.Tensor:
        sizes.append(len(jobs))
        return draw(jobs, *args)

    monkeypatch.setattr(renderer, "_draw", recording_draw)
    return sizes


def test_rows_whose_prompts_differ_slightly_do_not_share_a_start(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adapters of two versions would differ like this; the pictures remain correct."""
    renderer = make_renderer(parts)
    sources = references(1)
    jobs = make_group(tiny.WORDS, sources)
    payload: HiddenStates = jobs[1].payload
    moved = payload.embeds.clone()
    moved[payload.pictures[0].start - 1, 0] += 1
    jobs[1] = replace(jobs[1], payload=replace(payload, embeds=moved))
    parts = record_parts(renderer, monkeypatch)
    together = render_floats(renderer, jobs)
    assert parts == [1, 1, 1]
    assert (together - alone(renderer, jobs)).abs().max() <= PICTURE_TOL


def test_the_sources_of_a_group_are_processed_once(parts: Parts) -> None:
    """The keys of the sources that a step reads are as many for eight rows as for one."""
    renderer = make_renderer(parts)
    sources = references(2)
    jobs = make_group([tiny.WORDS[i % 3] for i in range(8)], sources)
    rows = [renderer._rows(job) for job in jobs]
    [(_, group)] = in_groups(jobs, rows)
    prepared = renderer._denoiser.prepare([row for row, *_ in group], (8, 4))
    first = rows[0][0].start_len
    start = first + 3 * sum(len(span) for span in jobs[0].payload.pictures)
    assert {len(part) for layer in prepared.shared for part in layer} == {start}
    num_rest = sum(len(job.payload.embeds) - first for job in jobs)
    assert {len(layer[0]) for layer in prepared.rest} == {num_rest}


def test_the_groups_of_a_batch_are_drawn_one_after_the_other(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keys of one group's sources at a time are held, as the memory plan assumes."""
    jobs = three_prompts()
    renderer = make_renderer(parts, height_px=64, width_px=96)
    part_sizes = record_parts(renderer, monkeypatch)
    together = render_floats(renderer, jobs)
    assert part_sizes == [2, 1]
    assert (together - alone(renderer, jobs)).abs().max() <= PICTURE_TOL


def test_pictures_whose_size_differs_from_the_vaes_are_refused(parts: Parts) -> None:
    job = make_job(tiny.WORDS[0], references(1), 0)
    wrong = make_renderer(parts, condition_area_px=128 * 128)
    with pytest.raises(ValueError, match=r"4 tokens.* 15 .*condition_area_px"):
        list(wrong.render([job]))
    blind = replace(job, payload=replace(job.payload, pictures=()))
    with pytest.raises(ValueError, match="no tokens"):
        list(make_renderer(parts).render([blind]))


def test_an_impossible_job_fails_with_the_reason(parts: Parts) -> None:
    many = make_job(tiny.WORDS[0], references(2), 0)
    long = make_job(tiny.WORDS[0], [], 0)
    states = torch.zeros(8192 - 4 + 1, tiny.STATE_DIM)
    long = replace(long, payload=HiddenStates(states))
    renderer = make_renderer(parts, max_pictures=1)
    outcomes = dict(renderer.render([many, long]))
    assert [isinstance(outcome, RenderFailure) for outcome in outcomes.values()] == [True, True]
    assert [holds(outcomes[0].reason, "too_many_sources: 2 ... 1"), outcomes[0].blame] == [
        True,
        "renderer",
    ]
    assert holds(outcomes[1].reason, "too_long: 8193 ... 8192") and outcomes[1].blame == "policy"
    guided = make_renderer(parts, true_cfg_scale=2.0)
    with pytest.raises(ValueError, match="negative_embeds"):
        list(guided.render([make_job(tiny.WORDS[0], [], 0)]))


def test_the_longest_allowed_row_can_be_rendered(parts: Parts) -> None:
    long = make_job(tiny.WORDS[0], [], 0)
    long = replace(long, payload=HiddenStates(torch.randn(8192 - 4, tiny.STATE_DIM)))
    ((_, picture),) = make_renderer(parts, num_steps=1).render([long])
    assert isinstance(picture, Image.Image)


@pytest.mark.parametrize("patched", [False, True])
def test_the_vae_equals_diffusers(patched: bool) -> None:
    """Some VAEs first fold patches of pixels into channels."""
    pixels = torch.rand(2, 4, 64, 96) * 2 - 1
    stock = tiny.make_vae(patched)
    mean, std = (
        torch.tensor(getattr(stock.config, f"latents_{name}")).view(1, -1, 1, 1)
        for name in ("mean", "std")
    )
    with torch.no_grad():
        mode = stock.encode(pixels.unsqueeze(2)).latent_dist.mode()[:, :, 0]
        expected = (mode - mean) / std
        decoded = stock.decode((expected * std + mean).unsqueeze(2)).sample[:, :, 0]
        vae = PictureVae(stock)
        ours = vae.encode(pixels)
        assert ours.shape == (2, 8, 4, 6)
        assert (ours - expected).abs().max() <= PICTURE_TOL
        assert (vae.decode(expected) - decoded).abs().max() <= PICTURE_TOL
