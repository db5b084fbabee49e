"""The rewards that ask a judge send the right prompts and pictures, and average its replies."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from tiny_faulty_judge import Fault, FaultyJudge
from tiny_messages import holds
from tiny_rewards import EDIT, RESULT, SOURCES, TARGET, ScriptedJudge, ask, grade, make

from rl.api.reward import Reward
from rl.api.types import Region, RewardInput, Sample
from rl.check.check_report import unread
from rl.config.loading import validate
from rl.judge.client import JudgeRefused
from rl.judge.reply import UnreadableReplyError
from rl.rewards.judged import (
    PROMPTS,
    EditQuality,
    ExpectedScore,
    GroundScore,
    Rubric,
    SpatialReward,
    VieScore,
    VieScoreT2I,
    read_grounded,
)

Plugin = type[Reward[Any]]
REWARDS = [VieScore, VieScoreT2I, EditQuality, GroundScore, SpatialReward, ExpectedScore]


def score(*numbers: float) -> str:
    return f'{{"reasoning": "r", "score": {list(numbers)}}}'


def marks(alignment: float, quality: float) -> str:
    return f'{{"alignment": {alignment}, "quality": {quality}}}'


def box(*corners: Any, label: Any = "the hat") -> dict[str, Any]:
    return {"id": 0, "label": label, "bbox_2d": list(corners)}


def grounded(*regions: Any, score: Any = (20, 10)) -> str:
    return json.dumps({"edit_region": regions, "reasoning": "<|bbox_0|> r", "score": score})


def labelled(probs: Mapping[int, float]) -> str:
    """A reply to a question with labels, with these probabilities."""
    return json.dumps({"token": "9", "logprobs": {k: math.log(p) for k, p in probs.items()}})


RUBRIC: dict[str, Any] = {
    "prompt": str(PROMPTS / "viescore_semantics.txt"),
    "scores": {"success": {"high": 5, "weight": 3}, "identity": {"low": -1, "high": 1}},
}
RATED = '{"reasoning": "r", "identity": 0, "success": 4, "keeps": 3}'


# --- the arithmetic, by hand ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reward", "config", "replies", "value", "parts"),
    [
        # SC = min(9, 4) = 4, PQ = min(8.5, 9) = 8.5, overall = sqrt(34) = 5.8310.
        (VieScore, {}, [score(9, 4), score(8.5, 9)], 0.5830951895, {
            "edit_success": 9, "over_edit": 4, "naturalness": 8.5, "artifacts": 9,
            "sc": 4, "pq": 8.5, "overall": 5.830951895, "sc_01": 0.4, "pq_01": 0.85,
        }),
        (VieScore, {}, [score(0, 10), score(10, 10)], 0.0, {"sc_01": 0, "pq_01": 1}),
        (VieScore, {}, [score(10, 10)], 1.0, {"overall": 10}),
        # Readings 0.5 and 1.0; the third question about meaning is unreadable.
        (VieScore, {"n_evals": 3, "temperature": 0.7},
         [*[score(5, 5)] * 2, *[score(10, 10)] * 2, "no idea", score(1, 1)],
         0.75, {"edit_success": 7.5}),
        # SC = 4, PQ = min(9, 10) = 9, overall = sqrt(36) = 6.
        (VieScoreT2I, {}, [score(4), score(9, 10)], 0.6, {
            "prompt_following": 4, "naturalness": 9, "artifacts": 10,
            "sc": 4, "pq": 9, "overall": 6, "sc_01": 0.4, "pq_01": 0.9,
        }),
        # alignment (.9 + .6 + .3)/3 = .6, quality (1 + .5 + .6)/3 = .7, .6*.6 + .4*.7 = .64.
        (EditQuality, {}, [marks(0.9, 1), marks(0.6, 0.5), marks(0.3, 0.6)],
         0.64, {"alignment": 0.6, "quality": 0.7}),
        (EditQuality, {}, [marks(1, 1), marks(7, 0.5), marks(0.5, 0)],
         0.6 * 0.75 + 0.4 * 0.5, {"alignment": 0.75, "quality": 0.5}),
        # (3 * .5 + 1 * 1) / 4 = .625.
        (EditQuality, {"n_evals": 1, "alignment_weight": 3, "quality_weight": 1},
         [marks(0.5, 1)], 0.625, {"alignment": 0.5}),
        (GroundScore, {}, ['{"score": 7.5}'], 0.75, {"score": 7.5}),
        # SC = (.6 * 20 + .4 * 10) / 2.5 = 6.4, PQ = (15 + 20) / 5 = 7, overall = 6.4^.8 * 7^.2.
        (SpatialReward, {}, [grounded(), score(15, 20)], 0.6515738, {
            "edit_success": 20, "over_edit": 10, "naturalness": 15, "artifacts": 20,
            "sc": 6.4, "pq": 7, "overall": 6.515738, "sc_01": 0.64, "pq_01": 0.7,
        }),
        (SpatialReward, {}, [grounded(score=(25, 25)), score(25, 25)], 1.0, {}),
        # P(success = 9) = .6/.95 = .63158; restraint is 9 or 6: E[min] = .63158 * 7.5, of 9.
        # Entropies: -.63158 ln .63158 - .36842 ln .36842 = .65811, and ln 2.
        (ExpectedScore, {}, [labelled({9: 0.6, 0: 0.35}), labelled({9: 0.5, 6: 0.5})], 0.5263158, {
            "success": 0.6315789, "restraint": 0.8333333, "expected_minimum": 0.5263158,
            "success_entropy": 0.6581100, "restraint_entropy": 0.6931472, "legal_mass": 0.95,
        }),
        (ExpectedScore, {"min_legal_mass": 0.8}, [labelled({0: 0.4, 9: 0.4})], 0.25, {}),
        # success 4/5 = .8, identity (0 + 1)/2 = .5; (3 * .8 + .5) / 4 = .725.
        (Rubric, RUBRIC, [RATED], 0.725, {"success": 4, "identity": 0, "overall": 0.725}),
        (Rubric, RUBRIC | {"combine": "min"}, [RATED], 0.5, {"success": 4}),
    ],
)  # fmt: skip
def test_a_grade_is_computed_from_replies_by_hand(
    reward: Plugin, config: dict[str, Any], replies: list[str], value: float, parts: Any
) -> None:
    judge = ScriptedJudge(*replies)
    result = grade(reward, judge, **config)
    assert result.value == pytest.approx(value)
    assert {name: result.parts[name] for name in parts} == pytest.approx(parts)
    assert len(parts) < 3 or result.parts.keys() == parts.keys()
    assert result.failure is None and len(result.replies) == len(judge.asked)
    num_readings = reward.Config(**config).n_evals
    assert sorted(set(judge.repeats)) == list(range(num_readings)), "numbers of the readings"


BOX = box(1, 2, 3, 4)
UNGROUNDED = [
    "I see an edit at [100, 200, 300, 400] and say 20 and 10.",
    '{"edit_region": [{"id": 0, "label": "hat", "bbox_2d": [100, 200, 300',
    json.dumps({"edit_region": [BOX]}),
    json.dumps({"reasoning": "r", "score": [20, 10]}),
    json.dumps({"edit_region": BOX, "score": [20, 10]}),
    grounded(BOX, score=(100, 200, 300, 400)),
    grounded(BOX, score=(20, 200)),
    grounded([1, 2, 3, 4]),
    grounded({"id": 0, "bbox_2d": [1, 2, 3, 4]}),
    grounded(box(1, 2, 3, 4, label=5)),
    grounded(box(1, 2, 3, 4, 5)),
    grounded(box("1", "2", "3", "4")),
    grounded(box(0, 0, True, True)),
    grounded(BOX, box(1, 2, 3, 1001)),
    grounded(box(300, 2, 1, 4)),
    grounded(box(1, 2, 1, 4)),
    grounded(*[BOX] * 33),
    '{"edit_region": [], "score": [1, 1], "score": [25, 25]}',
]
"""A coordinate never becomes a score, and a malformed box makes the whole reply unreadable."""


@pytest.mark.parametrize(
    ("reward", "replies"),
    [
        (VieScore, ["no idea", score(5, 5)]),
        (VieScore, [score(5, 5), "no idea"]),
        (VieScoreT2I, [score(4, 4), score(9, 10)]),  # two scores where one was asked
        (EditQuality, ["seven"]),
        (ExpectedScore, [labelled({7: 0.5}), labelled({7: 0.95})]),
        *((SpatialReward, [reply, score(5, 5)]) for reply in UNGROUNDED),
    ],
)
def test_one_unreadable_reply_is_ungraded(reward: Plugin, replies: list[str]) -> None:
    judge = ScriptedJudge(*replies)
    result = grade(reward, judge)
    assert result.value is None and result.parts == {} and result.regions == ()
    assert (result.failure or "").startswith("unreadable: ")
    assert len(result.replies) == len(judge.asked), "the replies are recorded"


texts = st.text("7.-e \u00b2\u0663\u6f22")  # with digits that only some of Python's functions read
numbers = st.one_of(st.integers(-5, 1100), st.floats(), st.booleans(), st.none(), texts)


@settings(max_examples=30)
@given(st.lists(st.lists(numbers, max_size=5), max_size=3), st.lists(numbers, max_size=3))
def test_only_two_numbers_under_score_become_scores(corners: Any, marks: Any) -> None:
    try:
        read = read_grounded(grounded(*(box(*c) for c in corners), score=marks))
    except UnreadableReplyError:
        return
    assert list(read) == marks and all(0 <= mark <= 25 for mark in read)
    for region in read.regions:
        left, top, right, bottom = region.box
        assert 0 <= left < right <= 1 and 0 <= top < bottom <= 1


def test_repeats_use_other_seeds_and_the_rewards_temperature() -> None:
    evidence = RewardInput(Sample("a", EDIT, sources=SOURCES[:1]), "a rewriting", RESULT)
    with FaultyJudge(after=Fault(reply=marks(1, 1))) as judge:
        ask(EditQuality, judge, evidence, max_concurrency=1)
        ask(EditQuality, judge, evidence, {"n_evals": 1, "temperature": None})
    assert [r["seed"] for r in judge.requests] == [0, 1000, 2000, 0]
    assert [r["temperature"] for r in judge.requests] == [0.7] * 3 + [0.0]


@pytest.mark.parametrize("plugin", REWARDS)
@pytest.mark.parametrize("status", [401, 404])
def test_a_wrong_judge_setup_is_an_error(plugin: Any, status: int) -> None:
    evidence = RewardInput(Sample("a", EDIT, sources=SOURCES, target=TARGET), "rewritten", RESULT)
    with FaultyJudge(after=Fault(status)) as judge, pytest.raises(JudgeRefused):
        ask(plugin, judge, evidence)


# --- what the judge is shown ------------------------------------------------------------------


def prompt(name: str) -> str:
    text = (PROMPTS / f"{name}.txt").read_text(encoding="utf-8").strip()
    return text.replace("{instruction}", EDIT)


QUESTIONS: list[tuple[Plugin, list[tuple[Any, ...]]]] = [
    (VieScore, [
        (SOURCES[0], prompt("viescore_semantics"), RESULT), (prompt("viescore_perception"), RESULT),
    ]),
    (VieScoreT2I, [
        (prompt("viescore_t2i_semantics"), RESULT), (prompt("viescore_perception"), RESULT),
    ]),
    (EditQuality, [(SOURCES[0], prompt("edit_quality"), RESULT)]),
    (GroundScore, [(TARGET, prompt("ground_score"), RESULT)]),
    (SpatialReward, [
        (SOURCES[0], RESULT, prompt("spatial_semantics")), (RESULT, prompt("spatial_perception")),
    ]),
    (ExpectedScore, [
        (SOURCES[0], RESULT, prompt(name) + "\n\nAnswer with one digit from 0 (worst) to 9 (best) "
         "and nothing else.") for name in ("expected_success", "expected_restraint")
    ]),
]  # fmt: skip
"""Exact to the byte, as recorded replies are looked up by their question."""


def questions_of(reward: Plugin, num_sources: int, **config: Any) -> list[tuple[Any, ...]]:
    judge = ScriptedJudge("no idea")
    grade(reward, judge, num_sources, n_evals=1, **config)
    return [question.parts for question in judge.asked]


@pytest.mark.parametrize(("reward", "questions"), QUESTIONS)
def test_the_judge_gets_exact_prompts(reward: Plugin, questions: list[Any]) -> None:
    assert questions_of(reward, 1) == questions
    if reward in (GroundScore, VieScoreT2I):  # they show no source
        assert questions_of(reward, 3) == questions


def numbered(num_sources: int) -> list[Any]:
    """How several sources are shown."""
    shown = ((f"Source {n}:", source) for n, source in enumerate(SOURCES[:num_sources], 1))
    return [part for each in shown for part in each]


@pytest.mark.parametrize(
    ("reward", "name", "mark"),
    [(VieScore, "viescore_semantics", "score"), (EditQuality, "edit_quality", "alignment")],
)
@pytest.mark.parametrize("num_sources", [2, 3])
def test_several_sources_are_numbered(
    reward: Plugin, name: str, mark: str, num_sources: int
) -> None:
    *before, text, result = questions_of(reward, num_sources)[0]
    assert before == numbered(num_sources)
    one, several = prompt(name), prompt(f"{name}_of_several")
    assert (text, result) == (several, RESULT)
    assert one.splitlines()[-1] == several.splitlines()[-1] and f'"{mark}"' in one.splitlines()[-1]
    assert several.count(f"<instruction>\n{EDIT}\n</instruction>") == 1


def test_a_rubric_shows_what_the_config_says() -> None:
    judge = ScriptedJudge(RATED)
    result = grade(Rubric, judge, 2, **RUBRIC, shows=["target", "image", "prompt", "source"])
    assert result.value == pytest.approx(0.725)
    target, image, text, *sources = judge.asked[0].parts
    assert (target, image) == (TARGET, RESULT)
    assert sources == numbered(2)
    assert str(text).startswith(f"{prompt('viescore_semantics')}\n\nAnswer with exactly one JSON")
    assert str(text).endswith('{"reasoning": "...", "success": <0 to 5>, "identity": <-1 to 1>}')
    assert judge.asked[0].reply_schema["required"] == ["reasoning", "success", "identity"]


def test_the_regions_of_the_first_reading_are_kept() -> None:
    judge = ScriptedJudge(grounded(box(100, 250, 500, 1000)), score(5, 5))
    result = grade(SpatialReward, judge, 2)
    assert result.regions == (Region("the hat", (0.1, 0.25, 0.5, 1.0)),)
    assert judge.asked[0].parts[:3] == (*SOURCES[:2], RESULT)
    assert list(judge.asked[0].reply_schema["properties"]) == ["edit_region", "reasoning", "score"]


def test_a_users_prompt_file_replaces_the_shipped_prompts(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("Is this {instruction}?\n")
    [(*before, text, result), _] = questions_of(VieScore, 2, semantics_prompt=str(path))
    assert before == numbered(2)
    assert (text, result) == (f"Is this {EDIT}?", RESULT)
    path.write_text("Rate the edit <instruction>.")
    with pytest.raises(ValidationError, match=r"has no \{instruction\}"):
        VieScore.Config(semantics_prompt=str(path))


@pytest.mark.parametrize("reward", REWARDS)
@pytest.mark.parametrize("lacks", ["image", "source", "target"])
def test_a_missing_picture_is_ungraded_and_the_judge_is_not_asked(reward: Any, lacks: str) -> None:
    sources = () if lacks == "source" else SOURCES[:1]
    sample = Sample("a", EDIT, sources=sources, target=None if lacks == "target" else TARGET)
    judge = ScriptedJudge("no idea")
    image = None if lacks == "image" else RESULT
    plugin = make(reward, reward.Config(), judge)
    result = asyncio.run(plugin.grade(RewardInput(sample, "a rewriting", image)))
    is_needed = lacks in plugin.needs
    assert (result.failure or "").startswith("no_image: ") == (not judge.asked) == is_needed


@pytest.mark.parametrize(
    ("plugin", "config", "reason"),
    [
        (VieScore, {"semantics_prompt": "/no/such/file.txt"}, "semantics_prompt: .*/no/such"),
        (VieScore, {"perception_prompt": "/no/such/file.txt"}, "perception_prompt: .*/no/such"),
        (VieScore, {"n_evals": 0}, "n_evals"),
        (VieScoreT2I, {"semantics_prompt": "/no/such/file.txt"}, "semantics_prompt: .*/no/such"),
        (EditQuality, {"prompt": "/no/such/file.txt"}, "prompt: .*/no/such"),
        (EditQuality, {"alignment_weight": 0, "quality_weight": 0}, "both 0"),
        (GroundScore, {"prompt": "/no/such/file.txt"}, "prompt: .*/no/such"),
        (ExpectedScore, {"n_evals": 3, "temperature": 1}, "(?s)n_evals.*be 1.*temperature"),
        (Rubric, {"prompt": ""}, "(?s)prompt.*at least 1 character"),
        (Rubric, {"prompt": "/no/such/file.txt"}, "prompt: .*/no/such"),
        (Rubric, {"prompt": str(PROMPTS / "viescore_perception.txt")}, r"no \{instruction\}"),
        (Rubric, {"scores": {}}, "scores: give at least one"),
        (Rubric, {"scores": {"a b": {}}}, "not usable in a metric name"),
        (Rubric, {"scores": {"reasoning": {}}}, "scores.reasoning: "),
        (Rubric, {"scores": {"a": {"low": 3, "high": 3}}}, r"(?s)scores.a.*low=3 must be below"),
        (Rubric, {"scores": {"a": {"weight": 0}}}, "scores: .* with a weight"),
        (Rubric, {"shows": ["prompt", "source"]}, "shows: .*'image'"),
        (Rubric, {"shows": ["image", "prompt", "image"]}, "shows: .*once"),
    ],
)
def test_an_invalid_config_is_refused(plugin: Any, config: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        plugin.Config(**((RUBRIC if plugin is Rubric else {}) | config))


def test_a_misspelt_key_of_a_score_is_named_and_an_unused_one_reported() -> None:
    scores = {"a": {"hgih": 3}, "b": {"low": "0"}}
    _, problems = validate(Rubric.Config, RUBRIC | {"scores": scores}, "rewards.mine")
    assert holds(problems[0], "rewards.mine.scores.a.hgih: ... 'high'")
    assert holds(problems[1], 'rewards.mine.scores.b.low: "0" given ... Worst value')
    [line] = unread(Rubric.Config(**RUBRIC, combine="min"), {})
    assert line.startswith("scores.success.weight: ")
