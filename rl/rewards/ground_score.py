"""Reward plugin: the judge scores how close an edit is to the reference (EARL's GroundScore)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rl.rewards.shared.judging import Asked, JudgedReward, Pictures, RepeatsConfig


class Config(RepeatsConfig):
    """The prompt for the judge, and how often the judge is asked."""

    own_prompts = {"prompt": "ground_score.txt"}
    prompt: str = ""
    """File with the judge's prompt; '' = the built-in one. The judge sees the reference first, then
    the prompt, then the policy's picture."""


class GroundScore(JudgedReward[Config]):
    """Grades one picture, `score` 0 to 10. The judge sees the reference (`Sample.target`) and the
    policy's picture, not the source or the instruction."""

    needs = frozenset({"target", "image"})

    def questions(self, instruction: str, pictures: Pictures) -> Sequence[Asked]:
        [prompt] = self.prompts_for(pictures)
        ranges = {"score": (0.0, 10.0)}
        return [self.asked_for(ranges, *pictures["target"], prompt, *pictures["image"])]

    def reading(self, marks: Sequence[float]) -> Mapping[str, float]:
        return {"score": marks[0]}

    def value_of(self, parts: Mapping[str, float]) -> float:
        return parts["score"] / 10
