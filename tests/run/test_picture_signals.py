"""Signals of pictures, and their correlation with the reward within groups."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageEnhance, ImageFilter
from tiny_run import SAMPLE, episode

from rl.algorithm.metrics import Metrics
from rl.api.types import Completion, Episode, Prompt, Sample, Status
from rl.ranks.dist import Dist
from rl.run.episode_metrics import View, add_signals, signals, within_groups
from rl.run.metric_table import doc_of

SCENE = Image.new("RGB", (96, 64), (120, 130, 140))
ImageDraw.Draw(SCENE).ellipse((20, 10, 60, 50), fill=(200, 60, 40))
SCENE = SCENE.filter(ImageFilter.GaussianBlur(1))


def of(picture: Image.Image, source: Image.Image | None = SCENE) -> dict[str, float]:
    return signals(View.of(picture), None if source is None else View.of(source))


def test_a_picture_equals_itself_and_the_signals_grow_with_what_they_measure() -> None:
    assert of(SCENE) == {"similarity": 1.0, "copies": 1.0, "sharpness": 0.0, "saturation": 0.0}
    assert of(ImageEnhance.Sharpness(SCENE).enhance(4))["sharpness"] > 1
    assert of(ImageEnhance.Color(SCENE).enhance(2))["saturation"] > 0.1
    assert of(SCENE.filter(ImageFilter.GaussianBlur(2)))["sharpness"] < -1


@pytest.mark.parametrize(("level", "copy"), [(31, 1.0), (33, 0.0)])
def test_a_patch_of_one_thumbnail_pixel_makes_a_copy_an_edit(level: int, copy: float) -> None:
    source, edited = Image.new("RGB", (64, 64)), Image.new("RGB", (64, 64))
    edited.paste((level, 0, 0), (10, 10, 12, 12))  # 2 x 2 px: one of 32 x 32
    found = of(edited, source)
    assert found["copies"] == copy, "the limit is 255 / 8 = 31.9"
    assert found["similarity"] == pytest.approx(1 - level / 255 / (32 * 32 * 3))


def test_sharpness_and_saturation_by_hand() -> None:
    # Columns of 0 and 200 in turn: the Laplacian is 2 * (200 - 0) or its negative, so its variance
    # is 400^2. Red is fully saturated, grey not at all.
    stripes = np.zeros((10, 12), np.uint8)
    stripes[:, ::2] = 200
    found = of(Image.fromarray(stripes).convert("RGB"), None)
    assert found == {"sharpness": pytest.approx(np.log2(400**2 + 1)), "saturation": 0.0}
    assert of(Image.new("RGB", (8, 8), "red"), None) == {"sharpness": 0.0, "saturation": 1.0}
    assert of(Image.new("RGB", (2, 2)), None)["sharpness"] == 0.0, "too small to measure"


def test_the_correlation_equals_that_of_the_deviations_from_group_means() -> None:
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(2, 50, 8))
    y += 0.5 * x + 10 * generator.normal(size=(50, 1))  # groups differ by more than their members
    x -= x.mean(1, keepdims=True)
    y -= y.mean(1, keepdims=True)
    sums = np.stack([(x * x).sum(1), (x * y).sum(1), (y * y).sum(1)], axis=1)
    correlation, error = within_groups(sums) or (0.0, 0.0)
    assert correlation == pytest.approx(np.corrcoef(x.ravel(), y.ravel())[0, 1])
    # The error against a bootstrap over the groups, of the slope in the same units.
    picked = generator.integers(50, size=(4000, 50))
    slopes = sums[picked, 1].sum(1) / sums[picked, 0].sum(1)
    scale = (sums[:, 0].sum() / sums[:, 2].sum()) ** 0.5
    assert error == pytest.approx(slopes.std() * scale, rel=0.1)
    assert within_groups(sums[:1]) is None, "one group has no error"
    assert within_groups(sums * [1, 0, 0]) is None, "equal rewards"


def metrics_of(groups: Sequence[Sequence[Episode]]) -> dict[str, float]:
    metrics = Metrics()
    add_signals(metrics, groups, Dist())
    return Dist().reduce(metrics)


def member(length: int, reward: float | None, sample: Sample = SAMPLE, **more: object) -> Episode:
    completion = Completion((5,) * length, (0.0,) * length, "stop")
    return episode(completion=completion, reward=reward, prompt=Prompt(sample, (1,)), **more)


def test_metrics_of_a_rollout_are_documented_and_leave_out_what_is_not_there() -> None:
    copy = {"image": SAMPLE.source}
    groups = [
        [member(1, 0.9, **copy), member(2, 0.25), member(3, 0.5)],
        [member(4, 0.2, **copy), member(2, 0.1), member(1, None, status=Status.UNGRADED)],
    ]
    found = metrics_of(groups)
    assert found["pictures/copies"] == pytest.approx(2 / 6)
    assert found["pictures/rewarded_copies"] == pytest.approx(1 / 5), "of the graded ones"
    x, y = np.array([-1, 0, 1, 1, -1]), np.array([0.35, -0.3, -0.05, 0.05, -0.05])
    correlation = (x @ y) / ((x @ x) * (y @ y)) ** 0.5
    assert found["reward/correlation/length"] == pytest.approx(correlation)
    assert all(map(doc_of, found))
    assert metrics_of([]) == {}
    text_only = metrics_of([[member(1, 0.1, image=None), member(2, 0.2, image=None)]] * 2)
    assert set(text_only) == {"reward/correlation/length", "reward/correlation/length_error"}
    drawn = metrics_of([[member(1, 0.1, Sample("a", "a cat"))] * 2])
    assert set(drawn) == {"pictures/sharpness", "pictures/saturation"}, "no source, equal members"
