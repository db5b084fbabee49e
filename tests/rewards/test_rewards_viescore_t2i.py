"""VIEScore for text-to-image: one mark for meaning, two for the picture."""

from __future__ import annotations

import pytest
from PIL import Image
from tiny_faulty_judge import Fault, FaultyJudge
from tiny_rewards import ask

from rl.api.types import RewardInput, Sample
from rl.rewards import viescore_t2i

PICTURE = Image.new("RGB", (16, 16), (200, 20, 30))
EVIDENCE = RewardInput(Sample("a", "a {square} wheel"), "a rewrite, 4k", PICTURE)


class PromptJudge(FaultyJudge):
    """Serves one mark to questions that show a prompt, two to the others."""

    def __init__(self, meaning: str, picture: str) -> None:
        self.meaning, self.picture = meaning, picture
        super().__init__()

    def begin(self, body: bytes, headers: dict[str, str]) -> Fault:
        super().begin(body, headers)
        text = self.requests[-1]["messages"][0]["content"][0]["text"]
        marks = self.meaning if "<prompt>" in text else self.picture
        return Fault(reply=f'{{"score": {marks}}}')


def test_by_hand() -> None:
    """SC = 4, PQ = min(9, 10) = 9, overall = sqrt(36) = 6, value .6."""
    with PromptJudge("[4]", "[9, 10]") as judge:
        result = ask(viescore_t2i, judge, EVIDENCE)
    assert result.value == pytest.approx(0.6) and len(result.replies) == 2
    assert result.parts == pytest.approx(
        {
            "prompt_following": 4, "naturalness": 9, "artifacts": 10,
            "sc": 4, "pq": 9, "overall": 6, "sc_01": 0.4, "pq_01": 0.9,
        }
    )  # fmt: skip


def test_it_is_asked_about_the_users_words() -> None:
    with PromptJudge("[4]", "[9, 10]") as judge:
        ask(viescore_t2i, judge, EVIDENCE)
    asked = [request["messages"][0]["content"] for request in judge.requests]
    assert all([part["type"] for part in parts] == ["text", "image_url"] for parts in asked)
    with_prompt = [parts[0]["text"] for parts in asked if "<prompt>" in parts[0]["text"]]
    assert len(asked) == 2 and len(with_prompt) == 1
    assert "<prompt>\na {square} wheel\n</prompt>" in with_prompt[0]
    assert not any("4k" in parts[0]["text"] for parts in asked)


def test_two_marks_for_meaning_are_unreadable() -> None:
    with PromptJudge("[4, 4]", "[9, 10]") as judge:
        result = ask(viescore_t2i, judge, EVIDENCE)
    assert result.value is None and (result.failure or "").startswith("unreadable: ")
