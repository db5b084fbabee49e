"""How near an edit comes to the reference edit, by the judge's eye (after EARL's GroundScore).

The judge sees the reference (`Sample.target`) and the policy's picture; neither the source nor the
instruction. `score` is 0-10, the value a tenth of it. `sqrt(viescore_pq x ground_score)` is
`final_reward: { op: 'geometric_mean', weights: { 'viescore/pq_01': 1, ground_score: 1 } }`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rl.rewards.shared.repeated_judging import Asked, JudgedReward, Pictures, RepeatsConfig


class Config(RepeatsConfig):
    """Which words the judge is asked in, and how often."""

    own_prompts = {"prompt": "ground_score.txt"}
    prompt: str = ""
    """File with the question; '' = ours. The reference precedes the text, the policy's picture
    follows it."""


class GroundScore(JudgedReward[Config]):
    """Grades one picture."""

    needs = frozenset({"target", "image"})

    def questions(self, instruction: str, pictures: Pictures) -> Sequence[Asked]:
        [prompt] = self.prompts_for(pictures)
        return [self.asked_for(["score"], 10, *pictures["target"], prompt, *pictures["image"])]

    def reading(self, marks: Sequence[float]) -> Mapping[str, float]:
        return {"score": marks[0]}

    def value_of(self, parts: Mapping[str, float]) -> float:
        return parts["score"] / 10
