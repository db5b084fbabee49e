"""The five points of the reward `prompt_quality`, counted by hand."""

from __future__ import annotations

import pytest
from tiny_rewards import grade_of

from rl.rewards.judged import PromptQuality, score

CAT = "a cat"
LONG = "a beautiful fluffy cat sitting on a windowsill, soft natural lighting, high quality, 4k"
RABBIT = "a purple rabbit eating carrots"


@pytest.mark.parametrize(
    ("original", "enhanced", "points"),
    [
        # 14 words for 2; cat kept; 11 new; "high quality" and "4k"; 13 of 14 words differ.
        (CAT, LONG, (1, 1, 1, 1, 1)),
        # Nothing was done: 2 words.
        (CAT, CAT, (0, 1, 0, 0, 0)),
        # 6 words for 5: .2; purple and rabbit of four keywords; large, blue, thing: 3 of 5.
        (RABBIT, "a large blue purple rabbit thing", (0.2, 0.5, 0.6, 0, 1)),
        # Shorter, and about something else: dog is one new word.
        (RABBIT, "dog", (0, 0, 0.2, 0, 0)),
        # Repetition has no structure: 2 of 6 words differ. Quality words are new details, too.
        (CAT, "cat cat cat cat cat detailed", (1, 1, 0.2, 1, 0)),
        # Quality words of the user's prompt do not count.
        ("a detailed cat", "the detailed cat over there now", (1, 1, 0.2, 0, 1)),
        (CAT, "", (0, 0, 0, 0, 0)),
    ],
)
def test_the_points_are_counted(original: str, enhanced: str, points: tuple[float, ...]) -> None:
    grade = grade_of(PromptQuality, enhanced, instruction=original)
    names = ("length", "keywords_kept", "new_details", "quality_words", "structure")
    expected = dict(zip(names, points, strict=True))
    assert grade.parts == pytest.approx({**expected, "total_0_5": sum(points)})
    assert grade.value == pytest.approx(sum(points) / 5) and grade.failure is None


def test_case_and_punctuation_do_not_matter_and_other_alphabets_work() -> None:
    points = score("A Crimson CAT!", "crimson; cat.")
    assert points["keywords_kept"] == 1 and points["new_details"] == 0
    assert score("красный кот", "красный кот на снегу")["keywords_kept"] == 1


def test_prompt_quality_is_not_in_the_final_reward_by_default() -> None:
    assert PromptQuality.diagnostic
    parts = grade_of(PromptQuality, LONG, instruction=CAT).parts
    assert set(parts) - {"total_0_5"} == PromptQuality.unit_parts
