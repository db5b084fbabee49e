"""An evaluation raises or warns if two arms with equal words have unequal rewards."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from PIL import Image
from tiny_messages import holds
from tiny_run import episode

from rl.algorithm.metrics import Metrics
from rl.api.types import Episode, Status
from rl.ranks.dist import Dist
from rl.run.chain import UnequalRewardsError, check_equal_words

RIGHT = episode(reward=0.95)
OTHER_PICTURE = {"image": Image.new("RGB", (48, 32), (254, 0, 0))}


def policy(**changes: Any) -> Episode:
    return replace(RIGHT, **changes)


def check(arms: list[Episode], at_start: bool = True, images: int = 1) -> dict[str, float]:
    arms_P = [{"the policy": arm, "bare": None, "right": RIGHT} for arm in arms]
    check_equal_words(metrics := Metrics(), arms_P, images, at_start, Dist())
    return Metrics.merge([metrics.state()])


def test_different_scores_for_equal_pictures_stop_the_run_at_its_start(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parts = "equal pictures ... sample row-7 ... 0.143 (the policy) ... 0.950 (right)"
    with pytest.raises(UnequalRewardsError) as error:
        check([policy(), policy(reward=0.143)])
    assert holds(error.value, parts)
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
    "changes",
    [
        {"reward": 0.94},  # a model that grades in batches
        {"reward": None, "status": Status.UNGRADED},
        {"reward": 0.0, "status": Status.POLICY_FAILED},
        {"reward": 0.0, "parts": {"another reward": 0.0}},
        {"reward": 0.0, "completion": replace(RIGHT.completion, token_ids=(5, 7))},
    ],
)
def test_episodes_that_are_not_comparable_are_not_compared(
    changes: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    check([policy(**changes)])
    assert not capsys.readouterr().err


def test_the_judges_noise_is_measured_on_pictures_that_are_not_bit_equal() -> None:
    rewards = (0.95, 0.75, 0.85)
    # The differences to 0.95 are 0, 0.2 and 0.1; each is of two gradings, with twice the variance.
    expected = ((0.2**2 + 0.1**2) / 3 / 2) ** 0.5
    found = check([policy(reward=reward, **OTHER_PICTURE) for reward in rewards])
    assert found == {"eval/equal_words_std": pytest.approx(expected)}
    assert check([policy()]) == {}, "the judge was asked once about equal pictures"
