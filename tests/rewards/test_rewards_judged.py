"""The rewards that ask a judge send the right prompts and pictures, and average its replies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from PIL import Image
from pydantic import ValidationError
from tiny_faulty_judge import Fault, FaultyJudge
from tiny_rewards import ask, make

from rl.api.judge import Answer, Question
from rl.api.types import RewardInput, RewardOutput, Sample
from rl.config.schema import JudgeConfig
from rl.judge.client import JudgeRefused
from rl.judge.reply import UnreadableReplyError
from rl.rewards import edit_quality, ground_score, viescore, viescore_t2i
from rl.rewards.shared.repeated_judging import PROMPTS

REWARDS = [viescore, viescore_t2i, edit_quality, ground_score]
SOURCES = tuple(Image.new("RGB", (8, 8), colour) for colour in ("red", "green", "blue"))
RESULT, TARGET = (Image.new("RGB", (8, 8), colour) for colour in ("white", "black"))
EDIT = "put the {dot} of picture 2 into picture 1"


class ScriptedJudge:
    """Gives its replies in order and then repeats the last one; records the questions."""

    config = JudgeConfig()

    def __init__(self, *replies: str) -> None:
        self.replies = list(replies)
        self.asked: list[Question] = []
        self.repeats: list[int] = []

    async def ask(
        self, question: Question, parse: Callable[[str], Any], repeat: int = 0
    ) -> Answer[Any]:
        self.asked.append(question)
        self.repeats.append(repeat)
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        try:
            return Answer(parse(reply), (reply,), None, 1, 0.1)
        except UnreadableReplyError as error:
            return Answer(None, (reply,), f"unreadable: {error}", 1, 0.1)


def grade(
    reward: ModuleType, judge: ScriptedJudge, num_sources: int = 1, **config: Any
) -> RewardOutput:
    sample = Sample("a", EDIT, sources=SOURCES[:num_sources], target=TARGET)
    plugin = make(reward, reward.Config(**config), judge)
    output: RewardOutput = asyncio.run(plugin.grade(RewardInput(sample, "a rewriting", RESULT)))
    return output


def score(*numbers: float) -> str:
    return f'{{"reasoning": "r", "score": {list(numbers)}}}'


def marks(alignment: float, quality: float) -> str:
    return f'{{"alignment": {alignment}, "quality": {quality}}}'


# --- the arithmetic, by hand ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reward", "config", "replies", "value", "parts"),
    [
        # SC = min(9, 4) = 4, PQ = min(8.5, 9) = 8.5, overall = sqrt(34) = 5.8310.
        (viescore, {}, [score(9, 4), score(8.5, 9)], 0.5830951895, {
            "edit_success": 9, "over_edit": 4, "naturalness": 8.5, "artifacts": 9,
            "sc": 4, "pq": 8.5, "overall": 5.830951895, "sc_01": 0.4, "pq_01": 0.85,
        }),
        (viescore, {}, [score(0, 10), score(10, 10)], 0.0, {"sc_01": 0, "pq_01": 1}),
        (viescore, {}, [score(10, 10)], 1.0, {"overall": 10}),
        # Readings 0.5 and 1.0; the third question about meaning is unreadable.
        (viescore, {"n_evals": 3, "temperature": 0.7},
         [*[score(5, 5)] * 2, *[score(10, 10)] * 2, "no idea", score(1, 1)],
         0.75, {"edit_success": 7.5}),
        # SC = 4, PQ = min(9, 10) = 9, overall = sqrt(36) = 6.
        (viescore_t2i, {}, [score(4), score(9, 10)], 0.6, {
            "prompt_following": 4, "naturalness": 9, "artifacts": 10,
            "sc": 4, "pq": 9, "overall": 6, "sc_01": 0.4, "pq_01": 0.9,
        }),
        # alignment (.9 + .6 + .3)/3 = .6, quality (1 + .5 + .6)/3 = .7, .6*.6 + .4*.7 = .64.
        (edit_quality, {}, [marks(0.9, 1), marks(0.6, 0.5), marks(0.3, 0.6)],
         0.64, {"alignment": 0.6, "quality": 0.7}),
        (edit_quality, {}, [marks(1, 1), marks(7, 0.5), marks(0.5, 0)],
         0.6 * 0.75 + 0.4 * 0.5, {"alignment": 0.75, "quality": 0.5}),
        # (3 * .5 + 1 * 1) / 4 = .625.
        (edit_quality, {"n_evals": 1, "alignment_weight": 3, "quality_weight": 1},
         [marks(0.5, 1)], 0.625, {"alignment": 0.5}),
        (ground_score, {}, ['{"score": 7.5}'], 0.75, {"score": 7.5}),
    ],
)  # fmt: skip
def test_a_grade_is_computed_from_replies_by_hand(
    reward: ModuleType, config: dict[str, Any], replies: list[str], value: float, parts: Any
) -> None:
    judge = ScriptedJudge(*replies)
    result = grade(reward, judge, **config)
    assert result.value == pytest.approx(value)
    assert {name: result.parts[name] for name in parts} == pytest.approx(parts)
    assert len(parts) < 3 or result.parts.keys() == parts.keys()
    assert result.failure is None and len(result.replies) == len(judge.asked)
    num_readings = reward.Config(**config).n_evals
    assert sorted(set(judge.repeats)) == list(range(num_readings)), "numbers of the readings"


def test_the_value_of_each_reading_is_kept() -> None:
    judge = ScriptedJudge(marks(0.9, 1), marks(0.6, 0.5), marks(0.3, 0.6))
    assert grade(edit_quality, judge).readings == pytest.approx((0.94, 0.56, 0.42))
    assert grade(ground_score, ScriptedJudge('{"score": 7.5}')).readings == (), "one reading"


@pytest.mark.parametrize(
    ("reward", "replies"),
    [
        (viescore, ["no idea", score(5, 5)]),
        (viescore, [score(5, 5), "no idea"]),
        (viescore_t2i, [score(4, 4), score(9, 10)]),  # two scores where one was asked
        (edit_quality, ["seven"]),
    ],
)
def test_one_unreadable_reply_is_ungraded(reward: ModuleType, replies: list[str]) -> None:
    judge = ScriptedJudge(*replies)
    result = grade(reward, judge)
    assert result.value is None and result.parts == {}
    assert (result.failure or "").startswith("unreadable: ")
    assert len(result.replies) == len(judge.asked), "the replies are recorded"


def test_repeats_use_other_seeds_and_the_rewards_temperature() -> None:
    evidence = RewardInput(Sample("a", EDIT, sources=SOURCES[:1]), "a rewriting", RESULT)
    with FaultyJudge(after=Fault(reply=marks(1, 1))) as judge:
        ask(edit_quality, judge, evidence, max_concurrency=1)
        ask(edit_quality, judge, evidence, {"n_evals": 1, "temperature": None})
        with pytest.raises(ValueError, match=r"n_evals=3 .*temperature 0"):
            ask(edit_quality, judge, evidence, {"temperature": None})
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


QUESTIONS: list[tuple[ModuleType, list[tuple[Any, ...]]]] = [
    (viescore, [
        (SOURCES[0], prompt("viescore_semantics"), RESULT), (prompt("viescore_perception"), RESULT),
    ]),
    (viescore_t2i, [
        (prompt("viescore_t2i_semantics"), RESULT), (prompt("viescore_perception"), RESULT),
    ]),
    (edit_quality, [(SOURCES[0], prompt("edit_quality"), RESULT)]),
    (ground_score, [(TARGET, prompt("ground_score"), RESULT)]),
]  # fmt: skip
"""Exact to the byte, as recorded replies are looked up by their question."""


def questions_of(reward: ModuleType, num_sources: int, **config: Any) -> list[tuple[Any, ...]]:
    judge = ScriptedJudge("no idea")
    grade(reward, judge, num_sources, n_evals=1, **config)
    return [question.parts for question in judge.asked]


@pytest.mark.parametrize(("reward", "questions"), QUESTIONS)
def test_the_judge_gets_exact_prompts(reward: ModuleType, questions: list[Any]) -> None:
    assert questions_of(reward, 1) == questions
    if reward in (ground_score, viescore_t2i):  # they show no source
        assert questions_of(reward, 3) == questions


@pytest.mark.parametrize(
    ("reward", "name", "mark"),
    [(viescore, "viescore_semantics", "score"), (edit_quality, "edit_quality", "alignment")],
)
@pytest.mark.parametrize("num_sources", [2, 3])
def test_several_sources_are_numbered(
    reward: ModuleType, name: str, mark: str, num_sources: int
) -> None:
    *before, text, result = questions_of(reward, num_sources)[0]
    assert before[::2] == [f"Source {number}:" for number in range(1, num_sources + 1)]
    assert tuple(before[1::2]) == SOURCES[:num_sources]
    one, several = prompt(name), prompt(f"{name}_of_several")
    assert (text, result) == (several, RESULT)
    assert one.splitlines()[-1] == several.splitlines()[-1] and f'"{mark}"' in one.splitlines()[-1]
    assert several.count(f"<instruction>\n{EDIT}\n</instruction>") == 1


def test_a_users_prompt_file_replaces_the_shipped_prompts(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("Is this {instruction}?\n")
    [(*before, text, result), _] = questions_of(viescore, 2, semantics_prompt=str(path))
    assert before == ["Source 1:", SOURCES[0], "Source 2:", SOURCES[1]]
    assert (text, result) == (f"Is this {EDIT}?", RESULT)
    path.write_text("Rate the edit <instruction>.")
    with pytest.raises(ValidationError, match=r"has no \{instruction\}"):
        viescore.Config(semantics_prompt=str(path))


@pytest.mark.parametrize("reward", REWARDS)
@pytest.mark.parametrize("lacks", ["image", "source", "target"])
def test_a_missing_picture_is_ungraded_and_the_judge_is_not_asked(reward: Any, lacks: str) -> None:
    sources = () if lacks == "source" else SOURCES[:1]
    sample = Sample("a", EDIT, sources=sources, target=None if lacks == "target" else TARGET)
    judge = ScriptedJudge("no idea")
    plugin = make(reward, reward.Config(), judge)
    result = asyncio.run(
        plugin.grade(RewardInput(sample, "a rewriting", None if lacks == "image" else RESULT))
    )
    is_needed = lacks in plugin.needs
    assert (result.failure or "").startswith("no_image: ") == (not judge.asked) == is_needed


@pytest.mark.parametrize(
    ("plugin", "config", "reason"),
    [
        (viescore, {"semantics_prompt": "/no/such/file.txt"}, "semantics_prompt: .*/no/such"),
        (viescore, {"perception_prompt": "/no/such/file.txt"}, "perception_prompt: .*/no/such"),
        (viescore, {"n_evals": 0}, "n_evals"),
        (viescore, {"n_evals": 3, "temperature": 0}, "n_evals=3 .*temperature 0"),
        (viescore_t2i, {"semantics_prompt": "/no/such/file.txt"}, "semantics_prompt: .*/no/such"),
        (edit_quality, {"prompt": "/no/such/file.txt"}, "prompt: .*/no/such"),
        (edit_quality, {"temperature": 0}, "n_evals=3 .*temperature 0"),
        (edit_quality, {"alignment_weight": 0, "quality_weight": 0}, "both 0"),
        (ground_score, {"prompt": "/no/such/file.txt"}, "prompt: .*/no/such"),
    ],
)
def test_an_invalid_config_is_refused(plugin: Any, config: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        plugin.Config(**config)
