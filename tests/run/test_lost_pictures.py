"""Pictures that are not drawn or not graded: how many stop a run, and which sizes always fail."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image
from tiny_messages import names
from tiny_run import run_config

from rl.algorithm.metrics import Metrics
from rl.api.types import RenderFailure, RewardOutput, Sample
from rl.ranks.dist import Dist
from rl.renderers.qwen_image_edit import QwenImageEdit
from rl.rollout.episodes import PictureOutcome, Verdict, picture_outcome
from rl.run.lost_pictures import LostPictures, TooManyRenderFailuresError
from rl.run.metric_table import check_known

WIDE, SQUARE = (96, 32), (64, 64)
BROKEN = "renderer: exception: RuntimeError: no kernel"


def drawn(num: int, size: tuple[int, int] | None = SQUARE) -> list[PictureOutcome]:
    return [PictureOutcome("s", size)] * num


def lost(num: int, size: tuple[int, int] | None = WIDE) -> list[PictureOutcome]:
    return [PictureOutcome("row-7", size, BROKEN, by_renderer=True)] * num


def ungraded(num: int, size: tuple[int, int] | None = WIDE) -> list[PictureOutcome]:
    return [PictureOutcome("row-8", size, "viescore: refused: HTTP 400 aspect ratio")] * num


@pytest.fixture
def pictures() -> LostPictures:
    return LostPictures(run_config().max_render_failure_rate)


@pytest.mark.parametrize(
    "iterations",
    [
        [drawn(1, SQUARE) + lost(1)],  # half of a tiny one
        [drawn(90) + lost(8)] + [drawn(98)] * 9,  # a batch of eight that broke once
        [drawn(96) + lost(4)] * 20,  # 4 % for ever
        [drawn(4) + lost(1), *[drawn(5)] * 3] * 40,  # 5 % for ever
        [ungraded(90) + drawn(10)] * 9,  # the judge's
        [[]] * 9,
    ],
)
def test_a_failure_now_and_then_does_not_stop_a_run(
    pictures: LostPictures, iterations: list[list[PictureOutcome]]
) -> None:
    for iteration in iterations:
        pictures.add(iteration, Dist())


@pytest.mark.parametrize(
    ("iteration", "num_iterations", "figures"),
    [
        (lost(8), 2, "16 of the last 16"),  # 8 are within the 10 that 200 pictures may lose
        (drawn(8) + lost(2), 6, "12 of the last 60"),
        (drawn(90) + lost(10), 2, "20 of the last 200"),
        (drawn(940) + lost(60), 1, "60 of the last 1000"),
    ],
)
def test_a_renderer_that_keeps_failing_stops_the_run(
    pictures: LostPictures, iteration: list[PictureOutcome], num_iterations: int, figures: str
) -> None:
    for _ in range(num_iterations - 1):
        pictures.add(iteration, Dist())
    message = rf"{figures} pictures .*RuntimeError.*max_render_failure_rate=0.05"
    with pytest.raises(TooManyRenderFailuresError, match=message):
        pictures.add(iteration, Dist())


def test_long_ago_is_forgotten_and_nought_allows_none(pictures: LostPictures) -> None:
    pictures.add(drawn(190) + lost(10), Dist())
    for _ in range(2):
        pictures.add(drawn(100), Dist())
    pictures.add(drawn(90) + lost(10), Dist())
    with pytest.raises(TooManyRenderFailuresError, match="1 of the last 100 "):
        LostPictures(0.0).add(drawn(99) + lost(1), Dist())


@pytest.mark.parametrize("fails", [lost, ungraded], ids=["renderer", "judge"])
def test_a_size_that_always_fails_is_named_once(capsys, fails: Any) -> None:
    pictures = LostPictures(1.0)
    pictures.add(drawn(90) + fails(8), Dist())
    assert capsys.readouterr().err == "", "one batch may break"
    for _ in range(5):
        pictures.add(drawn(90) + fails(2), Dist())
    [line] = capsys.readouterr().err.strip().split("\n")
    assert "96x32 px, 10 of 10 lost" in line
    assert "sample row-" in line and fails(1)[0].failure in line
    assert Metrics.merge([pictures.metrics.state()])["pictures/failing_sizes"] == 1
    pictures.add(drawn(3, WIDE) + fails(1), Dist())
    metrics = Metrics.merge([pictures.metrics.state()])
    assert metrics["pictures/failing_sizes"] == 0, "one got through"
    check_known(metrics, {})
    for _ in range(4):
        pictures.add(drawn(90) + fails(2), Dist())
    assert capsys.readouterr().err.count("WARNING") == 1, "it has begun again"


def test_a_number_of_sources_that_always_fails_is_named(capsys) -> None:
    """One size, of which only those made of three pictures do not fit in memory."""
    sample = Sample("row-9", "join them", (Image.new("RGB", SQUARE),) * 3)
    failed = picture_outcome(sample, SQUARE, Verdict(None, RenderFailure("out_of_memory")))
    assert failed is not None
    pictures = LostPictures(1.0)
    for _ in range(3):
        pictures.add(drawn(90, SQUARE) + [failed] * 2, Dist())
    [line] = capsys.readouterr().err.strip().split("\n")
    assert names(line, "64x64 px of 3 source ... 4 of 4 lost")


@pytest.mark.parametrize(
    "iteration",
    [
        lost(8, WIDE) + lost(8, SQUARE),  # all fail: no matter of size
        drawn(1, WIDE) + lost(8, WIDE),  # seldom, but it does get through
        drawn(9),
    ],
)
def test_sizes_that_do_not_always_fail_alone_are_not_named(
    capsys: pytest.CaptureFixture[str], iteration: list[PictureOutcome]
) -> None:
    pictures = LostPictures(1.0)
    for _ in range(9):
        pictures.add(iteration, Dist())
    assert capsys.readouterr().err == ""


def test_what_became_of_a_picture() -> None:
    sample, size = Sample("s", "do it"), (8, 8)
    image = Image.new("RGB", size)

    def outcome(verdict: Verdict) -> PictureOutcome | None:
        return picture_outcome(sample, size, verdict)

    assert outcome(Verdict(None, RenderFailure("odd", "policy"))) is None
    failed = outcome(Verdict(None, RenderFailure("odd")))
    assert failed == PictureOutcome("s", size, "renderer: odd", by_renderer=True)
    grades = {"a": RewardOutput(0.5), "b": RewardOutput(None, failure="timeout: slow")}
    assert outcome(Verdict(image, None, grades)) == PictureOutcome("s", size)
    del grades["a"]
    assert outcome(Verdict(image, None, grades)) == PictureOutcome("s", size, "b: timeout: slow")


@pytest.mark.parametrize(
    ("side_px", "buckets"),
    [
        (None, [(64, 64), (64, 64), (96, 32)]),
        (32, [(128, 128), (128, 128), (224, 64)]),
    ],
)
def test_an_editor_counts_failures_by_the_size_that_it_draws_or_reads(
    side_px: int | None, buckets: list[tuple[int, int]]
) -> None:
    editor = QwenImageEdit.__new__(QwenImageEdit)
    areas = {"output_area_px": 64 * 64, "condition_area_px": 128 * 128}
    editor.config = SimpleNamespace(width_px=side_px, height_px=side_px, **areas)
    sources = [Image.new("RGB", size) for size in ((1000, 990), (500, 512), (900, 300))]
    found = [editor.size_bucket(Sample("s", "do it", (source,))) for source in sources]
    assert found == buckets
    last = editor.size_bucket(Sample("s", "join them", (sources[2], sources[0])))
    assert last == buckets[0], "the last one's aspect is the picture's"
