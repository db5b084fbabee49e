"""Several source pictures: the stock Edit-Plus pipeline, batches, and failures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import tiny_editor
from diffusers import QwenImageEditPlusPipeline
from PIL import Image
from tiny_editor import TINY, StockParts, make_job, render_stock
from tiny_messages import holds
from tiny_pictures import make_picture, render_alone, render_floats
from tiny_rounding import PICTURE_TOL, apart

from rl.api.types import RenderJob
from rl.renderers.qwen_image_edit import QwenImageEdit, QwenImageEditPlus
from rl.renderers.qwen_image_loop import QwenImageLoop

SIZES = ((128, 64), (64, 96), (64, 64))
PICTURES = tuple(make_picture(seed, *size) for seed, size in enumerate(SIZES))


def job_of(pictures: Sequence[Image.Image], length: int = 9) -> RenderJob:
    job = make_job(None, length, 3, negative_length=5)
    return replace(job, sample=replace(job.sample, sources=tuple(pictures)))


def plus(stock: StockParts, **changes: Any) -> QwenImageLoop:
    values = TINY | {"type": "qwen_image_edit_plus", "max_pictures": 3} | changes
    return QwenImageLoop(QwenImageEditPlus.Config.model_validate(values), stock.ours())


@pytest.fixture(scope="module", params=[False, True], ids=["2509", "2511"])
def stock(request: pytest.FixtureRequest) -> StockParts:
    return tiny_editor.make_stock(zero_cond_t=request.param)


@pytest.mark.parametrize(("num_pictures", "scale"), [(1, 4.0), (2, 1.0), (3, 4.0)])
def test_the_loop_equals_the_stock_pipeline(
    stock: StockParts, num_pictures: int, scale: float
) -> None:
    """All pictures have different shapes, and the drawn one has the shape of the last."""
    job = job_of(PICTURES[:num_pictures])
    expected = render_stock(stock, [job], QwenImageEditPlusPipeline, true_cfg_scale=scale)
    width, height = SIZES[num_pictures - 1]
    assert (expected.shape[-1] / expected.shape[-2] > 1) == (width / height > 1)
    assert apart(render_floats(plus(stock, true_cfg_scale=scale), [job]), expected) <= PICTURE_TOL


def test_every_source_and_their_order_change_the_picture(stock: StockParts) -> None:
    a, b, c, d = (make_picture(seed) for seed in range(4))
    renderer = plus(stock)
    first, *others = (
        render_floats(renderer, [job_of(pictures)])
        for pictures in ([a, b, c], [b, a, c], [a, b, d], [a, b])
    )
    assert min(apart(other, first) for other in others) > 5 * PICTURE_TOL


def test_jobs_of_a_batch_have_equal_sizes_and_do_not_affect_each_other(stock: StockParts) -> None:
    jobs = [job_of(PICTURES[:2], length=length) for length in (9, 14)]
    others = [job_of(PICTURES[:1]), job_of(PICTURES[:2][::-1]), job_of(PICTURES)]
    renderer = plus(stock)
    buckets = [renderer.bucket_of(renderer.config, job) for job in [*jobs, *others]]
    assert buckets[0] == buckets[1] and len(set(buckets)) == 4
    assert apart(render_floats(renderer, jobs), render_alone(renderer, jobs)) <= PICTURE_TOL
    drawn = dict(renderer.render([*jobs, *others]))
    assert all(isinstance(picture, Image.Image) for picture in drawn.values())


def test_grey_and_transparent_sources_are_read_as_rgb_on_white(stock: StockParts) -> None:
    grey, clear = PICTURES[0].convert("L"), Image.new("RGBA", (64, 64), (255, 0, 0, 0))
    rgb = [grey.convert("RGB"), Image.new("RGB", (64, 64), "white")]
    renderer = plus(stock)
    left, right = (render_floats(renderer, [job_of(each)]) for each in ([grey, clear], rgb))
    assert apart(left, right) <= PICTURE_TOL


def test_more_sources_than_the_renderer_reads_are_a_failure(stock: StockParts) -> None:
    edit = QwenImageLoop(QwenImageEdit.Config.model_validate(TINY), stock.ours())
    for renderer, most in ((plus(stock, max_pictures=2), 2), (edit, 1)):
        [(_, failure)] = renderer.render([job_of(PICTURES)])
        assert holds(failure.reason, f"too_many_sources: 3 ... at most {most}")
        assert failure.blame == "renderer"
