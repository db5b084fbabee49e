"""Equal words in two arms of a held-out run have equal rewards, or somebody is told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from PIL import Image
from tiny_messages import names
from tiny_run import episode

from rl.api.types import Episode, Status
from rl.ranks.dist import Dist
from rl.run.equal_words import UnequalRewardsError, check_equal_words

RIGHT = episode(reward=0.95)
OTHER_PICTURE = Image.new("RGB", (48, 32), (254, 0, 0))


def check(*arms: Episode, at_start: bool = True) -> None:
    arms_P = [{"the policy": arm, "bare": None, "right": RIGHT} for arm in arms]
    check_equal_words(arms_P, at_start, Dist())


def test_another_score_for_the_same_picture_stops_the_run_at_its_start(
    capsys: pytest.CaptureFixture[str],
) -> None:
    parts = "equal pictures ... sample row-7 ... 0.143 (the policy) ... 0.950 (right)"
    arms = RIGHT, replace(RIGHT, reward=0.143)
    with pytest.raises(UnequalRewardsError) as error:
        check(*arms)
    assert names(error.value, parts)
    check(*arms, at_start=False)
    assert names(capsys.readouterr().err, parts), "later than that it is a warning"


@pytest.mark.parametrize(
    "changes",
    [
        {"reward": 0.94},  # a model that grades in batches
        {"reward": 0.0, "image": OTHER_PICTURE},
        {"reward": None, "status": Status.UNGRADED},
        {"reward": 0.0, "status": Status.POLICY_FAILED},
        {"reward": 0.0, "parts": {"another reward": 0.0}},
        {"reward": 0.0, "completion": replace(RIGHT.completion, token_ids=(5, 7))},
    ],
)
def test_what_is_not_comparable_is_not_compared(
    changes: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    check(replace(RIGHT, **changes))
    assert not capsys.readouterr().err
