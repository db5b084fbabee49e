"""Several source pictures, against the stock Edit-Plus pipeline, and which of them make a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import tiny_editor
import torch
from diffusers import QwenImageEditPlusPipeline
from PIL import Image
from tiny_editor import TINY, StockParts, make_job, render_floats, render_stock
from tiny_messages import names
from tiny_pictures import make_picture
from tiny_rounding import PICTURE, apart

from rl.api.types import RenderFailure, RenderJob
from rl.renderers import qwen_image_edit, qwen_image_edit_plus
from rl.renderers.qwen_image.qwen_image_loop import QwenImageLoop

SIZES = ((128, 64), (64, 96), (64, 64))
PICTURES = tuple(make_picture(seed, *size) for seed, size in enumerate(SIZES))


def job_of(pictures: Sequence[Image.Image], **more: Any) -> RenderJob:
    given: dict[str, Any] = {"length": 9, "noise_seed": 3, "negative_length": 5} | more
    job = make_job(pictures[0], **given)
    return dataclasses.replace(job, sample=dataclasses.replace(job.sample, sources=tuple(pictures)))


def plus(stock: StockParts, **changes: Any) -> QwenImageLoop:
    values = TINY | {"type": "qwen_image_edit_plus", "max_pictures": 3} | changes
    config = qwen_image_edit_plus.Config.model_validate(values)
    return QwenImageLoop(config, stock.ours(), config.max_pictures)


@pytest.fixture
def small_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_editor.use_small_conditions(monkeypatch)


@pytest.fixture(scope="module", params=[False, True], ids=["2509", "2511"])
def stock(request: pytest.FixtureRequest) -> StockParts:
    return tiny_editor.make_stock(zero_cond_t=request.param)


@pytest.mark.usefixtures("small_stock")
@pytest.mark.parametrize("scale", [1.0, 4.0])
@pytest.mark.parametrize("num_pictures", [1, 2, 3])
def test_the_loop_equals_the_stock_pipeline(
    stock: StockParts, num_pictures: int, scale: float
) -> None:
    """No two pictures have one shape, and the last one's is that of what is drawn."""
    job = job_of(PICTURES[:num_pictures])
    expected = render_stock(stock, [job], QwenImageEditPlusPipeline, true_cfg_scale=scale)
    width, height = SIZES[num_pictures - 1]
    assert (expected.shape[-1] / expected.shape[-2] > 1) == (width / height > 1)
    ours = render_floats(plus(stock, true_cfg_scale=scale), [job])
    assert (ours - expected).abs().max() <= PICTURE


def test_every_picture_and_their_order_show(stock: StockParts) -> None:
    square = [make_picture(seed) for seed in range(4)]
    shown = [square[:3], [square[1], square[0], square[2]], [*square[:2], square[3]], square[:2]]
    renderer = plus(stock)
    drawn = [render_floats(renderer, [job_of(pictures)]) for pictures in shown]
    moved = [float((other - drawn[0]).abs().max()) for other in drawn[1:]]
    assert min(moved) > 5 * PICTURE, moved


def test_a_batch_shares_all_sizes_and_a_picture_is_its_own(stock: StockParts) -> None:
    jobs = [
        job_of([make_picture(seed, *size) for seed, size in enumerate(SIZES[:2])], length=length)
        for length in (9, 14)
    ]
    others = [job_of(PICTURES[:1]), job_of(PICTURES[:2][::-1]), job_of(PICTURES)]
    renderer = plus(stock)
    buckets = [renderer.bucket_of(job) for job in [*jobs, *others]]
    assert buckets[0] == buckets[1] and len(set(buckets)) == 4
    together = render_floats(renderer, jobs)
    alone = torch.cat([render_floats(renderer, [job]) for job in jobs])
    assert (together - alone).abs().max() <= PICTURE
    drawn = dict(renderer.render([*jobs, *others]))
    assert all(isinstance(picture, Image.Image) for picture in drawn.values())


def test_what_is_transparent_is_white_to_the_editor(stock: StockParts) -> None:
    clear = Image.new("RGBA", (64, 64), (255, 0, 0, 0))
    shown = [PICTURES[2], clear], [PICTURES[2], Image.new("RGB", (64, 64), "white")]
    left, right = (render_floats(plus(stock), [job_of(pictures)]) for pictures in shown)
    assert apart(left, right) <= PICTURE


def test_more_pictures_than_it_reads_are_no_batch(stock: StockParts) -> None:
    config = qwen_image_edit.Config.model_validate(TINY)
    for renderer, most in (
        (plus(stock, max_pictures=2), 2),
        (QwenImageLoop(config, stock.ours()), 1),
    ):
        [(_, failure)] = renderer.render([job_of(PICTURES)])
        assert isinstance(failure, RenderFailure)
        assert names(failure.reason, f"too_many_sources: 3 ... at most {most}")
        assert failure.blame == "renderer"


def test_sources_that_fill_the_positions_are_no_fault_of_the_policys(stock: StockParts) -> None:
    job = job_of(PICTURES[:2], length=5000)
    payload = dataclasses.replace(job.payload, pictures=(range(3, 2000), range(2003, 4095)))
    ((_, sources),) = plus(stock).render([dataclasses.replace(job, payload=payload)])
    ((_, words),) = plus(stock).render([job])
    assert isinstance(sources, RenderFailure) and isinstance(words, RenderFailure)
    assert sources.reason.startswith("sources_too_long: 4095 ")
    assert (sources.blame, words.blame) == ("renderer", "policy")
