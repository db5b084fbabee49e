"""What the rewards that ask a judge have in common."""

from __future__ import annotations

from typing import Any

import pytest
from PIL import Image
from pydantic import ValidationError
from tiny_faulty_judge import Fault, FaultyJudge
from tiny_rewards import ask

from rl.api.types import RewardInput, Sample
from rl.judge.client import JudgeRefused
from rl.rewards import edit_quality, ground_score, viescore, viescore_t2i

SOURCE, EDITED = (Image.new("RGB", (16, 16), (red, 20, 30)) for red in (10, 200))
BARE = Sample("a", "paint the sky red")
WHOLE = Sample("a", "paint the sky red", sources=(SOURCE,), target=SOURCE)


@pytest.mark.parametrize("plug", [viescore, viescore_t2i, edit_quality, ground_score])
@pytest.mark.parametrize("status", [401, 404])
def test_a_wrong_set_up_passes_through(plug: Any, status: int) -> None:
    with FaultyJudge(after=Fault(status)) as judge, pytest.raises(JudgeRefused):
        ask(plug, judge, RewardInput(WHOLE, "a rewrite", EDITED))


@pytest.mark.parametrize(
    ("plug", "reward_input"),
    [
        (viescore, RewardInput(WHOLE, "a rewrite", None)),
        (viescore_t2i, RewardInput(BARE, "", None)),
        (edit_quality, RewardInput(BARE, "a rewrite", EDITED)),
        (ground_score, RewardInput(WHOLE, "", None)),
        (ground_score, RewardInput(BARE, "", EDITED)),
    ],
)
def test_no_picture_is_no_question(plug: Any, reward_input: RewardInput) -> None:
    with FaultyJudge() as judge:
        result = ask(plug, judge, reward_input)
    assert result.value is None and (result.failure or "").startswith("no_image: ")
    assert judge.requests == []


@pytest.mark.parametrize(
    ("plug", "config", "reason"),
    [
        (viescore, {"semantics_prompt": "/no/such/file.txt"}, "semantics_prompt: .*/no/such"),
        (viescore, {"perception_prompt": "/no/such/file.txt"}, "perception_prompt: .*/no/such"),
        (viescore, {"n_eval": 3}, "n_eval"),
        (viescore, {"n_evals": 0}, "n_evals"),
        (viescore, {"n_evals": 3, "temperature": 0}, "n_evals=3 .*temperature 0"),
        (viescore_t2i, {"semantics_prompt": "/no/such/file.txt"}, "semantics_prompt: .*/no/such"),
        (viescore_t2i, {"n_evals": 2, "temperature": 0}, "n_evals=2 .*temperature 0"),
        (edit_quality, {"prompt": "/no/such/file.txt"}, "prompt: .*/no/such"),
        (edit_quality, {"temperature": 0}, "n_evals=3 .*temperature 0"),
        (edit_quality, {"alignment_weight": 0, "quality_weight": 0}, "both 0"),
        (edit_quality, {"weight": 1}, "weight"),
        (ground_score, {"prompt": "/no/such/file.txt"}, "prompt: .*/no/such"),
        (ground_score, {"n_evals": 3, "temperature": 0}, "n_evals=3 .*temperature 0"),
        (ground_score, {"n_evals": 0}, "n_evals"),
    ],
)
def test_a_config_that_cannot_serve_is_refused(
    plug: Any, config: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValidationError, match=reason):
        plug.Config(**config)
