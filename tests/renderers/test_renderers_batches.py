"""Render calls in batches: their order, shared source encodings, and failures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from unittest.mock import Mock

import pytest
import tiny_editor
import torch
from PIL import Image
from tiny_editor import assert_same_picture, make_job, make_renderer, three_jobs
from tiny_messages import holds
from tiny_pictures import make_picture, render_floats
from tiny_rounding import PICTURE_TOL, apart

from rl.api.types import RenderFailure
from rl.renderers import diffusion_loop, qwen_image_loop
from rl.renderers.diffusion_loop import Fits, Outcome, render_in_batches
from rl.renderers.qwen_image_loop import EditorParts


def test_a_batch_is_rendered_when_full_and_jobs_are_taken_only_when_needed() -> None:
    """A job is the width of its picture (0: it fails); a batch has two narrow or three wide ones,
    and a job that fails is one of its batch."""
    events: list[str] = []

    def take() -> Iterator[int]:
        for number, width in enumerate([1, 5, 1, 5, 0, 5, 1, 5, 1, 1]):
            events.append(f"take {number}")
            yield width

    def batch_of(width: int) -> tuple[str, int]:
        return ("narrow", 2) if width == 1 else ("wide", 3)

    def known(width: int) -> Outcome | None:
        return None if width else RenderFailure("nothing to draw")

    def render(widths: Sequence[int], bucket: str) -> list[Outcome]:
        assert set(widths) == {1 if bucket == "narrow" else 5}
        events.append(f"{len(widths)} {bucket}")
        return [Image.new("RGB", (width, 1)) for width in widths]

    outcomes: dict[int, Outcome] = {}
    for number, outcome in render_in_batches(take(), batch_of, known, render, {}):
        events.append(f"have {number}")
        outcomes[number] = outcome
    assert " / ".join(events) == (
        "take 0 / take 1 / take 2 / 2 narrow / have 0 / have 2 / take 3 / take 4 / have 4 / "
        "2 wide / have 1 / have 3 / take 5 / take 6 / take 7 / take 8 / 2 narrow / have 6 / "
        "have 8 / take 9 / 2 wide / have 5 / have 7 / 1 narrow / have 9"
    )
    assert outcomes.pop(4) == RenderFailure("nothing to draw")
    widths = {number: outcome.width for number, outcome in outcomes.items()}
    assert widths == {0: 1, 1: 5, 2: 1, 3: 5, 5: 5, 6: 1, 7: 5, 8: 1, 9: 1}


def test_a_batch_size_that_ran_out_of_memory_is_not_tried_again(caplog) -> None:
    """The device can hold 3 wide or 8 narrow pictures."""
    fits: Fits = {}

    def sizes_of(jobs: Sequence[int]) -> list[int]:
        sizes = []

        def render(widths: Sequence[int], is_wide: bool) -> list[Outcome]:
            sizes.append(len(widths))
            if is_wide and len(widths) > 3:
                raise torch.OutOfMemoryError("full")
            return [Image.new("RGB", (width, 1)) for width in widths]

        pictures = dict(
            render_in_batches(jobs, lambda w: (w > 50, 8), lambda w: None, render, fits)
        )
        assert [pictures[i].width for i in range(len(jobs))] == list(jobs), "one per job"
        return sizes

    assert sizes_of(range(51, 59)) == [8, 4, 2, 2, 2, 2]
    assert sizes_of(range(51, 56)) == [2, 2, 1], "the smaller size is kept for later calls"
    assert sizes_of(range(1, 9)) == [8], "pictures of another size have their own limit"
    first, second = (record.getMessage() for record in caplog.records)
    assert holds(first, "renderer.batch_size: 8 ... 4") and holds(second, "4 ... from now on 2")


def test_a_failed_picture_is_a_failure_and_a_failed_device_ends_the_run() -> None:
    def outcomes(error: Exception) -> list[Outcome]:
        render = Mock(side_effect=error)
        results = render_in_batches([1, 2], lambda job: ("", 2), lambda job: None, render, {})
        return [outcome for _, outcome in results]

    full, refused = torch.OutOfMemoryError("full"), RuntimeError("CUDA error: CUBLAS_STATUS")
    assert outcomes(full) == [RenderFailure("out_of_memory: full")] * 2
    assert outcomes(refused) == [RenderFailure(f"exception: RuntimeError: {refused}")] * 2
    for text in ("CUDA error: an illegal memory access", "CUDA error: device-side assert"):
        with pytest.raises(torch.AcceleratorError):
            outcomes(torch.AcceleratorError(text))


@pytest.fixture(scope="module")
def parts() -> EditorParts:
    return tiny_editor.make_parts()


def test_each_source_is_encoded_once_while_it_is_kept(
    parts: EditorParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts.vae, "encode", encode := Mock(wraps=parts.vae.encode))
    monkeypatch.setattr(qwen_image_loop, "NUM_KEPT_SOURCES", 2)
    first, second, third = map(make_picture, range(3))
    jobs = [make_job((first, second)[i % 2], 9, i, states_seed=i) for i in range(6)]
    renderer = make_renderer(parts, batch_size=4, num_steps=2)
    for drawn, num_encoded in ((jobs, 2), (jobs, 2), ([make_job(third, 9)], 3), (jobs[:1], 4)):
        assert len(dict(renderer.render(drawn))) == len(drawn)
        assert encode.call_count == num_encoded
    shapes = {call.args[0].shape for call in encode.call_args_list}
    assert shapes == {(1, 3, 64, 64)}, "alone, so that the batch does not change their latents"


def test_pictures_of_different_aspect_ratio_keep_it(parts: EditorParts) -> None:
    sizes = [(64, 64), (128, 64), (64, 128), (128, 64)]
    jobs = [make_job(make_picture(0, *size), 9) for size in sizes]
    pictures = dict(make_renderer(parts).render(jobs))
    assert [pictures[i].size for i in range(4)] == [(64, 64), (96, 32), (32, 96), (96, 32)]
    for index, job in enumerate(jobs):
        ((_, alone),) = make_renderer(parts).render([job])
        assert_same_picture(pictures[index], alone)


def test_nan_fails_only_its_own_picture(parts: EditorParts) -> None:
    jobs = three_jobs()
    jobs[1].payload.embeds[3, 7] = float("nan")
    renderer = make_renderer(parts, num_steps=2)
    outcomes = dict(renderer.render(jobs))
    assert outcomes[1].reason.startswith("non_finite")
    ((_, alone),) = renderer.render(jobs[:1])
    assert_same_picture(outcomes[0], alone)


def test_an_impossible_job_fails_with_the_reason(parts: EditorParts) -> None:
    source = make_picture(0)
    jobs = [make_job(None, 9), make_job(source, 4095), make_job(source, 4094)]
    outcomes = dict(make_renderer(parts, num_steps=2).render(jobs))
    assert holds(outcomes[0], "no_source ... blame='renderer'")
    assert holds(outcomes[1], "too_long: 4095 ... 4094 ... blame='policy'")
    assert isinstance(outcomes[2], Image.Image), "the longest text that is allowed"
    with pytest.raises(ValueError, match="true_cfg_scale: 1"):
        list(make_renderer(parts, true_cfg_scale=2.0).render([make_job(source, 9)]))


def test_large_pictures_are_decoded_in_slices(
    parts: EditorParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs, renderer = three_jobs(), make_renderer(parts)
    together = render_floats(renderer, jobs)
    monkeypatch.setattr(parts.vae, "decode", decode := Mock(wraps=parts.vae.decode))
    monkeypatch.setattr(diffusion_loop, "DECODED_PX_AT_ONCE", 2 * 64 * 64)
    assert apart(render_floats(renderer, jobs), together) <= PICTURE_TOL
    assert [len(call.args[0]) for call in decode.call_args_list] == [2, 1]
