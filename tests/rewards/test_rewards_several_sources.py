"""What a judge is shown of a sample with several source pictures, and with one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from PIL import Image
from tiny_rewards import make

from rl.api.judge import Answer, Question
from rl.api.types import RewardInput, Sample
from rl.config.schema import JudgeConfig
from rl.rewards import edit_quality, ground_score, viescore, viescore_t2i
from rl.rewards.shared.repeated_judging import PROMPTS

SOURCES = tuple(Image.new("RGB", (8, 8), colour) for colour in ("red", "green", "blue"))
MADE, GOAL = (Image.new("RGB", (8, 8), colour) for colour in ("white", "black"))
WORDS = "put the dot of picture 2 into picture 1"
REWARDS = [
    (viescore, "viescore_semantics", "score"),
    (edit_quality, "edit_quality", "alignment"),
]


class ListeningJudge:
    """Answers every question alike, and keeps them."""

    config = JudgeConfig()

    def __init__(self) -> None:
        self.heard: list[Question] = []

    async def ask(
        self, question: Question, parse: Callable[[str], Any], repeat: int = 0
    ) -> Answer[Any]:
        self.heard.append(question)
        marks = ("alignment", "quality") if "alignment" in str(question.parts) else ()
        numbers = 1 if '"score": [prompt following]' in str(question.parts) else 2
        score: Any = 1 if '"score": 0.0' in str(question.parts) else [1] * numbers
        reply = json.dumps(dict.fromkeys(marks, 1) if marks else {"score": score})
        return Answer(parse(reply), (reply,), None, 1, 0.0)


def questions(reward: ModuleType, num_sources: int, **config: Any) -> list[tuple[Any, ...]]:
    judge = ListeningJudge()
    sample = Sample("a", WORDS, sources=SOURCES[:num_sources], target=GOAL)
    made = make(reward, reward.Config(**config), judge)
    output = asyncio.run(made.grade(RewardInput(sample, "words", MADE)))
    assert output.value is not None, output.failure
    return [question.parts for question in judge.heard]


def file(name: str) -> str:
    text = (PROMPTS / f"{name}.txt").read_text(encoding="utf-8").strip()
    return text.replace("{instruction}", WORDS)


@pytest.mark.parametrize(("reward", "name", "_"), REWARDS)
def test_one_source_is_asked_about_as_ever(reward: ModuleType, name: str, _: str) -> None:
    """To the byte: replies that are paid for are found by the question."""
    assert questions(reward, 1)[0] == (SOURCES[0], file(name), MADE)


@pytest.mark.parametrize(("reward", "name", "_"), REWARDS)
@pytest.mark.parametrize("num_sources", [2, 3])
def test_several_sources_are_shown_under_their_numbers(
    reward: ModuleType, name: str, _: str, num_sources: int
) -> None:
    *shown, text, made = questions(reward, num_sources)[0]
    assert shown[::2] == [f"Source {number}:" for number in range(1, num_sources + 1)]
    assert tuple(shown[1::2]) == SOURCES[:num_sources]
    assert (text, made) == (file(f"{name}_of_several"), MADE)
    assert "the source." not in text and "the two pictures" not in text


@pytest.mark.parametrize(("reward", "name", "mark"), REWARDS)
def test_what_is_asked_for_of_several_is_what_is_read(
    reward: ModuleType, name: str, mark: str
) -> None:
    """The reply of both questions has one form, and its last lines say it."""
    one, several = file(name), file(f"{name}_of_several")
    assert one.splitlines()[-1] == several.splitlines()[-1] and f'"{mark}"' in one.splitlines()[-1]
    assert several.count(f"<instruction>\n{WORDS}\n</instruction>") == 1


def test_a_users_own_words_stand_for_both(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("Is this {instruction}?\n")
    [(*shown, text, made), _] = questions(viescore, 2, semantics_prompt=str(path))
    assert shown == ["Source 1:", SOURCES[0], "Source 2:", SOURCES[1]]
    assert (text, made) == (f"Is this {WORDS}?", MADE)


@pytest.mark.parametrize("reward", [ground_score, viescore_t2i])
def test_who_is_shown_no_source_asks_alike(reward: ModuleType) -> None:
    assert questions(reward, 1) == questions(reward, 3)
