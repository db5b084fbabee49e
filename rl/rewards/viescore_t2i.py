"""Reward plugin: VIEScore (Ku et al. 2023, arXiv 2312.14867) for text-to-image."""

from __future__ import annotations

from rl.rewards.shared.judging import PERCEPTION, PairedQuestions, VieScoreConfig


class Config(VieScoreConfig):
    """The judge's prompts, and how often each is asked. The picture follows each question."""

    own_prompts = {"semantics_prompt": "viescore_t2i_semantics.txt", **PERCEPTION}


class VieScoreT2I(PairedQuestions[Config]):
    """Grades one picture against the user's ORIGINAL prompt, not the policy's rewrite."""

    needs = frozenset({"image"})
    semantic_marks = ("prompt_following",)
