"""Several source pictures: the stock Edit-Plus pipeline, batches, and failures."""

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
from tiny_messages import holds
from tiny_pictures import make_picture
from tiny_rounding import PICTURE_TOL, apart

from rl.api.types import RenderFailure, RenderJob
from rl.renderers.qwen_image_edit import QwenImageEdit, QwenImageEditPlus
from rl.renderers.qwen_image_loop import QwenImageLoop

SIZES = ((128, 64), (64, 96), (64, 64))
PICTURES = tuple(make_picture(seed, *size) for seed, size in enumerate(SIZES))


def job_of(pictures: Sequence[Image.Image], **more: Any) -> RenderJob:
    settings: dict[str, Any] = {"length": 9, "noise_seed": 3, "negative_length": 5} | more
    job = make_job(pictures[0], **settings)
    return dataclasses.replace(job, sample=dataclasses.replace(job.sample, sources=tuple(pictures)))


def plus(stock: StockParts, **changes: Any) -> QwenImageLoop:
    values = TINY | {"type": "qwen_image_edit_plus", "max_pictures": 3} | changes
    config = QwenImageEditPlus.Config.model_validate(values)
    return QwenImageLoop(config, stock.ours())


@pytest.fixture
def small_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_editor.use_small_conditions(monkeypatch)


@pytest.fixture(scope="module", params=[False, True], ids=["2509", "2511"])
def stock(request: pytest.FixtureRequest) -> StockParts:
    return tiny_editor.make_stock(zero_cond_t=request.param)


@pytest.mark.usefixtures("small_stock")
@pytest.mark.parametrize(("num_pictures", "scale"), [(1, 4.0), (2, 1.0), (3, 4.0)])
def test_the_loop_equals_the_stock_pipeline(
    stock: StockParts, num_pictures: int, scale: float
) -> None:
    """All pictures have different shapes, and the drawn one has the shape of the last."""
    job = job_of(PICTURES[:num_pictures])
    expected = render_stock(stock, [job], QwenImageEditPlusPipeline, true_cfg_scale=scale)
    width, height = SIZES[num_pictures - 1]
    assert (expected.shape[-1] / expected.shape[-2] > 1) == (width / height > 1)
    ours = render_floats(plus(stock, true_cfg_scale=scale), [job])
    assert (ours - expected).abs().max() <= PICTURE_TOL


def test_every_source_and_their_order_change_the_picture(stock: StockParts) -> None:
    a, b, c, d = (make_picture(seed) for seed in range(4))
    source_lists = [[a, b, c], [b, a, c], [a, b, d], [a, b]]
    renderer = plus(stock)
    drawn = [render_floats(renderer, [job_of(pictures)]) for pictures in source_lists]
    differences = [float((other - drawn[0]).abs().max()) for other in drawn[1:]]
    assert min(differences) > 5 * PICTURE_TOL, differences


def test_jobs_of_a_batch_have_equal_sizes_and_do_not_affect_each_other(stock: StockParts) -> None:
    jobs = [
        job_of([make_picture(seed, *size) for seed, size in enumerate(SIZES[:2])], length=length)
        for length in (9, 14)
    ]
    others = [job_of(PICTURES[:1]), job_of(PICTURES[:2][::-1]), job_of(PICTURES)]
    renderer = plus(stock)
    buckets = [renderer.bucket_of(renderer.config, job) for job in [*jobs, *others]]
    assert buckets[0] == buckets[1] and len(set(buckets)) == 4
    together = render_floats(renderer, jobs)
    alone = torch.cat([render_floats(renderer, [job]) for job in jobs])
    assert (together - alone).abs().max() <= PICTURE_TOL
    drawn = dict(renderer.render([*jobs, *others]))
    assert all(isinstance(picture, Image.Image) for picture in drawn.values())


def test_a_transparent_source_is_placed_on_white(stock: StockParts) -> None:
    clear = Image.new("RGBA", (64, 64), (255, 0, 0, 0))
    source_lists = [PICTURES[2], clear], [PICTURES[2], Image.new("RGB", (64, 64), "white")]
    left, right = (render_floats(plus(stock), [job_of(pictures)]) for pictures in source_lists)
    assert apart(left, right) <= PICTURE_TOL


def test_more_sources_than_the_renderer_reads_are_a_failure(stock: StockParts) -> None:
    config = QwenImageEdit.Config.model_validate(TINY)
    for renderer, max_pictures in (
        (plus(stock, max_pictures=2), 2),
        (QwenImageLoop(config, stock.ours()), 1),
    ):
        [(_, failure)] = renderer.render([job_of(PICTURES)])
        assert isinstance(failure, RenderFailure)
        assert holds(failure.reason, f"too_many_sources: 3 ... at most {max_pictures}")
        assert failure.blame == "renderer"


def test_too_long_a_text_is_blamed_on_the_policy(stock: StockParts) -> None:
    ((_, long_text),) = plus(stock).render([job_of(PICTURES[:2], length=5000)])
    assert isinstance(long_text, RenderFailure)
    assert long_text.reason.startswith("too_long: ") and long_text.blame == "policy"
