"""An evaluation raises or warns if two arms with equal words have unequal pictures or rewards."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from PIL import Image
from tiny_messages import holds, raising
from tiny_run import episode

from rl.algorithm.metrics import Metrics
from rl.api.types import Episode, Status
from rl.ranks.dist import Dist
from rl.run.checks import BARE, POLICY, check_equal_words
from rl.run.metric_table import doc_of

RIGHT = episode(reward=0.95)
OTHER_PICTURE = {"image": Image.new("RGB", (48, 32), (254, 0, 0))}


policy = partial(replace, RIGHT)


def check(arms: list[Episode], at_start: bool = True, images: int = 1) -> dict[str, float]:
    arms_P = [{"the policy": arm, "bare": None, "right": RIGHT} for arm in arms]
    check_equal_words(metrics := Metrics(), arms_P, images, at_start, Dist())
    return Dist().reduce(metrics)


def test_different_scores_for_equal_pictures_stop_the_run_at_its_start(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parts = "equal pictures ... sample row-7 ... 0.143 (the policy) ... 0.950 (right)"
    with raising(RuntimeError, f"unequal rewards ... {parts}"):
        check([policy(), policy(reward=0.143)])
    check([policy(), policy(reward=0.6)])  # a random reward
    assert holds(capsys.readouterr().err, "equal pictures ... grades one picture differently")
    check([policy(), policy(reward=0.143)], at_start=False)
    assert holds(capsys.readouterr().err, parts), "after the start it is a warning"


@pytest.mark.parametrize(
    ("rewards", "images", "warns"),
    [
        ([0.0], 1, True),  # another completion's states
        ([0.95] * 9 + [0.4], 1, True),  # a large difference of one sample
        ([0.7] * 4, 1, True),  # a smaller difference of every sample
        ([0.8] * 4, 1, False),  # a judge that grades the same picture differently
        ([0.5, 0.95, 0.95, 0.95], 1, False),
        ([0.1], 2, True),  # an episode records only one of several pictures
        ([0.85], 2, False),
    ],
)
def test_different_pictures_of_equal_words_warn_beyond_the_judges_noise(
    rewards: list[float], images: int, warns: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = OTHER_PICTURE if images == 1 else {}
    check([policy(reward=reward, **picture) for reward in rewards], images=images)
    stderr = capsys.readouterr().err
    assert holds(stderr, "equal words ... pairs ... states") if warns else not stderr


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"reward": 0.94}, ""),  # a model that grades in batches
        ({"reward": None, "status": Status.UNGRADED}, ""),
        ({"reward": 0.0, "status": Status.POLICY_FAILED}, ""),
        ({"reward": 0.0, "parts": {"another reward": 0.0}}, ""),
        ({"reward": 0.0, "completion": replace(RIGHT.completion, token_ids=(5, 7))}, ""),
        ({"image": Image.new("RGB", (32, 48))}, "255.0 of 255 levels apart"),  # of another size
    ],
)
def test_episodes_that_are_not_comparable_are_not_compared(
    changes: dict[str, Any], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    check([policy(**changes)])
    stderr = capsys.readouterr().err
    assert holds(stderr, part) and bool(stderr) == bool(part)


def test_the_judges_noise_is_measured_on_pictures_that_are_not_bit_equal() -> None:
    rewards = (0.95, 0.75, 0.85)
    # The differences to 0.95 are 0, 0.2 and 0.1; each is of two gradings, with twice the variance.
    expected = ((0.2**2 + 0.1**2) / 3 / 2) ** 0.5
    assert check([policy(reward=reward, **OTHER_PICTURE) for reward in rewards]) == {
        "eval/equal_words_std": pytest.approx(expected),
        # One level of one of three channels, in every pair.
        "eval/equal_words_levels": pytest.approx(1 / 3),
    }
    assert check([policy()]) == {"eval/equal_words_levels": 0.0}, "of equal pictures"


def grey(level: int) -> dict[str, Any]:
    return {"image": Image.new("RGB", (48, 32), (level,) * 3)}


@pytest.mark.parametrize(
    ("bare", "alone", "warns"),
    [
        (None, 11, False),  # rounding
        (None, 13, True),
        (40, 19, False),  # other words change 30 levels: a third of that may be rounding
        (40, 21, True),
        (40, 40, True),  # the picture of the user's own words
    ],
)
def test_equal_words_draw_equal_pictures_along_all_paths(
    bare: int | None, alone: int, warns: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    arms = {
        POLICY: policy(**grey(10)),
        BARE: bare and policy(completion=replace(RIGHT.completion, token_ids=(8,)), **grey(bare)),
        "alone": policy(**grey(alone)),
    }
    check_equal_words(metrics := Metrics(), [arms] * 2, 1, True, Dist())
    found = Dist().reduce(metrics)
    # In the last case the words of the policy have the picture of other words.
    assert found["eval/equal_words_levels"] == alone - 10 and all(map(doc_of, found))
    stderr = capsys.readouterr().err
    assert holds(stderr, "different pictures ... policy and alone ... states") == warns
    assert warns or not stderr
