"""Reward plugin: VIEScore (Ku et al. 2023, arXiv 2312.14867) for edits."""

from __future__ import annotations

from rl.rewards.shared.judging import PERCEPTION, PairedQuestions, VieScoreConfig


class Config(VieScoreConfig):
    """The judge's prompts, and how often it is asked. The source picture (several: each after
    'Source 1:', ...) precedes the question about meaning, the edit follows it."""

    own_prompts = {"semantics_prompt": "viescore_semantics.txt", **PERCEPTION}
    own_prompts_of_several = {"semantics_prompt": "viescore_semantics_of_several.txt"}


class VieScore(PairedQuestions[Config]):
    """Grades one edit."""

    needs = frozenset({"source", "image"})
    semantic_marks = ("edit_success", "over_edit")
