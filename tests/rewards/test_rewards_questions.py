"""`rubric`, `spatial_reward`, `expected_score`: questions, strict parsing, arithmetic by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from tiny_faulty_judge import Fault, FaultyJudge, first_token
from tiny_rewards import EDIT, RESULT, SOURCES, TARGET, ScriptedJudge, ask, grade

from rl.api.types import Region, RewardInput, Sample
from rl.judge.reply import UnreadableReplyError
from rl.rewards import expected_score, rubric, spatial_reward
from rl.rewards.spatial_reward import read_grounded

# --- rubric -----------------------------------------------------------------------------------

SCORES = {"success": {"high": 5, "weight": 3}, "identity": {"low": -1, "high": 1}}


@pytest.fixture
def question(tmp_path: Path) -> str:
    path = tmp_path / "mine.txt"
    path.write_text("Was <task>{instruction}</task> done?\n")
    return str(path)


def reply(**scores: Any) -> str:
    return json.dumps({"reasoning": "r", **scores})


@pytest.mark.parametrize(
    ("combine", "scores", "value"),
    [
        # success 4/5 = .8, identity (0 + 1)/2 = .5; (3 * .8 + .5) / 4 = .725.
        ("weighted", SCORES, 0.725),
        ("min", SCORES, 0.5),
        # sqrt(min(.8, .3) * .5) = sqrt(.15)
        ("sqrt_min",
         {"success": {"high": 5, "group": "sc"}, "keeps": {"group": "sc"}, "identity":
          {"low": -1, "high": 1, "group": "pq"}}, math.sqrt(0.15)),
    ],
)  # fmt: skip
def test_a_rubric_by_hand(question: str, combine: str, scores: Any, value: float) -> None:
    judge = ScriptedJudge(reply(identity=0, success=4, keeps=3))
    result = grade(rubric, judge, prompt=question, scores=scores, combine=combine)
    assert result.value == pytest.approx(value)
    assert result.parts["success"] == 4 and result.parts["overall"] == result.value
    assert result.parts.keys() == {*scores, "overall"}


def test_a_rubric_shows_what_the_config_says(question: str) -> None:
    judge = ScriptedJudge(reply(success=5, identity=1))
    shows = ["target", "image", "prompt", "source"]
    assert grade(rubric, judge, 2, prompt=question, scores=SCORES, shows=shows).value == 1
    target, image, text, *sources = judge.asked[0].parts
    assert (target, image) == (TARGET, RESULT)
    assert sources == ["Source 1:", SOURCES[0], "Source 2:", SOURCES[1]]
    assert text.startswith(f"Was <task>{EDIT}</task> done?\n\nAnswer with exactly one JSON object")
    assert text.endswith('{"reasoning": "...", "success": <0 to 5>, "identity": <-1 to 1>}')
    assert judge.asked[0].reply_schema["required"] == ["reasoning", "success", "identity"]


def test_a_score_outside_its_own_range_is_ungraded(question: str) -> None:
    judge = ScriptedJudge(reply(success=4, identity=2))
    result = grade(rubric, judge, prompt=question, scores=SCORES)
    assert result.value is None and '"identity" outside -1..1' in (result.failure or "")


def test_a_rubric_needs_what_it_shows(question: str) -> None:
    shows = ["target", "prompt", "image"]
    config = rubric.Config(prompt=question, scores=SCORES, shows=shows, combine="min")
    assert rubric.Rubric.needs_with(config) == {"target", "image"}
    [line] = rubric.Rubric.no_effect(config)
    assert line.startswith("scores.success.weight: ")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prompt": ""}, "prompt: '' given; name the file"),
        ({"prompt": "/no/such/file.txt"}, "prompt: .*/no/such/file.txt"),
        ({"scores": {}}, "scores: empty"),
        ({"scores": {"a b": {}}}, "not usable in a metric name"),
        ({"scores": {"reasoning": {}}}, "scores.reasoning: "),
        ({"scores": {"a": {"low": 3, "high": 3}}}, r"(?s)scores.a.*low=3 must be below high=3"),
        ({"scores": {"a": {"hgih": 3}}}, r"(?s)scores.a.hgih"),
        ({"scores": {"a": {"weight": 0}}}, "all weights are 0"),
        ({"combine": "sqrt_min"}, "sqrt_min joins two groups"),
        ({"combine": "mean"}, "combine"),
        ({"shows": ["prompt", "source"]}, "shows: .*'image'"),
        ({"shows": ["image", "prompt", "image"]}, "shows: .*once"),
        ({"shows": ["image", "text"]}, "shows"),
        ({"n_evals": 3, "temperature": 0}, "n_evals=3"),
    ],
)
def test_a_wrong_rubric_is_refused(question: str, changes: Any, reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        rubric.Config(**{"prompt": question, "scores": SCORES, **changes})


def test_a_rubric_without_the_instruction_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("Is it good?")
    with pytest.raises(ValidationError, match=r"prompt: .*mine.txt has no \{instruction\}"):
        rubric.Config(prompt=str(path), scores=SCORES)


# --- spatial_reward ---------------------------------------------------------------------------


def box(*corners: Any, label: Any = "the hat") -> dict[str, Any]:
    return {"id": 0, "label": label, "bbox_2d": list(corners)}


def grounded(regions: Any, score: Any = (20, 10)) -> str:
    return json.dumps({"edit_region": regions, "reasoning": "<|bbox_0|> r", "score": list(score)})


PERCEPTION = json.dumps({"reasoning": "r", "score": [15, 20]})


def test_a_spatial_reward_by_hand() -> None:
    judge = ScriptedJudge(grounded([box(100, 250, 500, 1000)]), PERCEPTION)
    result = grade(spatial_reward, judge, 2)
    # SC = (.6 * 20 + .4 * 10) / 2.5 = 6.4, PQ = (15 + 20) / 5 = 7, overall = 6.4^.8 * 7^.2.
    assert result.parts["sc"] == pytest.approx(6.4) and result.parts["pq"] == pytest.approx(7)
    assert result.value == pytest.approx(6.4**0.8 * 7**0.2 / 10) == pytest.approx(0.6515738)
    assert result.regions == (Region("the hat", (0.1, 0.25, 0.5, 1.0)),)
    meaning, quality = judge.asked
    assert meaning.parts[:3] == (*SOURCES[:2], RESULT) and EDIT in str(meaning.parts[3])
    assert quality.parts[0] == RESULT and len(quality.parts) == 2
    assert list(meaning.reply_schema["properties"]) == ["edit_region", "reasoning", "score"]


@pytest.mark.parametrize(
    ("score", "quality", "value"), [((25, 25), (25, 25), 1), ((0, 0), (25, 25), 0)]
)
def test_the_ends_of_a_spatial_reward(score: Any, quality: Any, value: float) -> None:
    judge = ScriptedJudge(grounded([], score), json.dumps({"score": quality}))
    result = grade(spatial_reward, judge)
    assert result.value == value and result.regions == ()


UNREADABLE = {
    "prose": "I see an edit at [100, 200, 300, 400] and say 20 and 10.",
    "empty": "",
    "cut": '{"edit_region": [{"id": 0, "label": "hat", "bbox_2d": [100, 200, 300',
    "cut before the score": '{"edit_region": [], "reasoning": "r"',
    "no score": json.dumps({"edit_region": [box(1, 2, 3, 4)]}),
    "coordinates as scores": grounded([box(1, 2, 3, 4)], (100, 200, 300, 400)),
    "a coordinate as a score": grounded([box(1, 2, 3, 4)], (20, 200)),
    "no regions": json.dumps({"reasoning": "r", "score": [20, 10]}),
    "null": grounded(None),
    "a region alone": grounded(box(1, 2, 3, 4)),
    "corners without a label": grounded([[1, 2, 3, 4]]),
    "no label": grounded([{"id": 0, "bbox_2d": [1, 2, 3, 4]}]),
    "a number as the label": grounded([box(1, 2, 3, 4, label=5)]),
    "three corners": grounded([box(1, 2, 3)]),
    "five corners": grounded([box(1, 2, 3, 4, 5)]),
    "text": grounded([box("1", "2", "3", "4")]),
    "true": grounded([box(0, 0, True, True)]),
    "beyond 1000": grounded([box(1, 2, 3, 1001)]),
    "negative": grounded([box(-1, 2, 3, 4)]),
    "swapped": grounded([box(300, 2, 1, 4)]),
    "without area": grounded([box(1, 2, 1, 4)]),
    "one bad box of two": grounded([box(1, 2, 3, 4), box(1, 2, 3, 2000)]),
    "too many": grounded([box(1, 2, 3, 4)] * 33),
    "a score twice": '{"edit_region": [], "score": [1, 1], "score": [25, 25]}',
}


@pytest.mark.parametrize("text", UNREADABLE.values(), ids=UNREADABLE)
def test_an_unreadable_grounded_reply_is_ungraded(text: str) -> None:
    judge = ScriptedJudge(text, PERCEPTION)
    result = grade(spatial_reward, judge)
    assert result.value is None and (result.failure or "").startswith("unreadable: ")
    assert result.regions == () and result.replies == (text, PERCEPTION)


numbers = st.one_of(st.integers(-5, 1100), st.floats(), st.booleans(), st.none(), st.text())


@given(st.lists(st.lists(numbers, max_size=5), max_size=3), st.lists(numbers, max_size=3))
def test_only_two_numbers_under_score_become_scores(corners: Any, score: Any) -> None:
    try:
        scores, regions = read_grounded(grounded([box(*each) for each in corners], score))
    except UnreadableReplyError:
        return
    assert list(scores) == score and all(0 <= each <= 25 for each in scores)
    assert len(regions) == len(corners)
    for region in regions:
        left, top, right, bottom = region.box
        assert 0 <= left < right <= 1 and 0 <= top < bottom <= 1


# --- expected_score ---------------------------------------------------------------------------


def labelled(**probs: float) -> str:
    """A reply of the judge client, with these probabilities of the labels A, B, ..."""
    logprobs = {label: math.log(prob) for label, prob in probs.items()}
    return json.dumps({"token": "K", "logprobs": logprobs})


def test_an_expected_score_by_hand() -> None:
    judge = ScriptedJudge(labelled(K=0.6, A=0.35), labelled(K=0.5, F=0.5))
    result = grade(expected_score, judge, 2, labels="letters")
    # P(success = 10) = .6/.95 and else 0; restraint is 10 or 5, each with .5:
    # E[min] = .6/.95 * (.5 * 10 + .5 * 5) = 4.7368.
    assert result.value == pytest.approx(0.6 / 0.95 * 0.75)
    p = 0.6 / 0.95
    assert result.parts == pytest.approx({
        "success": p, "restraint": 0.75, "expected_minimum": p * 0.75, "legal_mass": 0.95,
        "success_entropy": -p * math.log(p) - (1 - p) * math.log(1 - p),
        "restraint_entropy": math.log(2),
    })  # fmt: skip
    *shown, text = judge.asked[0].parts
    assert shown == ["Source 1:", SOURCES[0], "Source 2:", SOURCES[1], RESULT]
    assert shown == list(judge.asked[1].parts[:-1]), "the pictures are a shared prefix"
    assert EDIT in str(text) and str(text).endswith("(best) and nothing else.")
    assert [len(question.labels) for question in judge.asked] == [11, 11]


def test_low_legal_mass_is_ungraded_and_the_threshold_is_a_key() -> None:
    first = labelled(A=0.4, K=0.4)
    result = grade(expected_score, ScriptedJudge(first), labels="letters")
    assert result.value is None and "less than min_legal_mass=0.9" in (result.failure or "")
    result = grade(expected_score, ScriptedJudge(first), labels="letters", min_legal_mass=0.8)
    assert result.value == pytest.approx(0.25) and result.parts["legal_mass"] == pytest.approx(0.8)


def test_an_expected_score_over_http() -> None:
    evidence = RewardInput(Sample("a", EDIT, sources=SOURCES[:1]), "a rewriting", RESULT)
    with FaultyJudge(after=Fault(body=first_token(("9", -0.02), ("0", -6.0)))) as judge:
        result = ask(expected_score, judge, evidence)
    p = math.exp(-0.02) / (math.exp(-0.02) + math.exp(-6.0))
    assert result.value == pytest.approx(p * p)
    assert [r["max_tokens"] for r in judge.requests] == [1, 1]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"labels": "words"}, "labels"), ({"min_legal_mass": 0}, "min_legal_mass"),
     ({"n_evals": 3}, "n_evals"), ({"success_prompt": "/no/such.txt"}, "success_prompt: ")],
)  # fmt: skip
def test_a_wrong_expected_score_is_refused(changes: Any, reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        expected_score.Config(**changes)
