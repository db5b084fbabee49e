"""Reward plugin, a diagnostic: five scores of the policy's rewrite of a prompt, from its text."""

from __future__ import annotations

import re

from rl.api.plugin import PluginConfig
from rl.api.reward import Reward
from rl.api.types import RewardInput, RewardOutput

NUM_NEW_DETAILS = 5
MIN_SENTENCE_WORDS = 5

_WORD = re.compile(r"[^\W_]+(?:['-][^\W_]+)*")
_FUNCTION_WORDS = frozenset(
    {
        "a", "an", "and", "are", "as", "at", "be", "but", "by", "for", "from", "has",
        "have", "in", "into", "is", "it", "its", "of", "on", "or", "over", "that", "the",
        "their", "there", "this", "to", "under", "up", "was", "were", "which", "while",
        "who", "with",
    }
)  # fmt: skip
_QUALITY_WORDS = re.compile(
    r"\b(?:high[- ]quality|(?:highly |intricately |finely )?detailed|intricate|sharp(?: focus)?|"
    r"4k|8k|hd|uhd|hdr|high[- ]resolution|photo-?realistic|hyper-?realistic|cinematic|"
    r"professional(?:ly)?|masterpiece|masterful|award[- ]winning|studio lighting|soft lighting|"
    r"golden hour|depth of field|bokeh|crisp|vivid|stunning|exquisite)\b"
)


Config = PluginConfig


class PromptQuality(Reward):
    """Value: the mean of the five scores; `total_0_5` is their sum. A diagnostic because a rewrite
    that merely lists quality terms scores well, whether or not the pictures get better."""

    needs = frozenset({"text"})
    reads_thoughts = False
    diagnostic = True
    unit_parts = frozenset({"length", "keywords_kept", "new_details", "quality_words", "structure"})

    async def grade(self, reward_input: RewardInput) -> RewardOutput:
        points = score(reward_input.sample.instruction, reward_input.words)
        total = sum(points.values())
        return RewardOutput(total / len(points), {**points, "total_0_5": total})


def score(original: str, enhanced: str) -> dict[str, float]:
    """The five scores, each 0..1, of a rewrite of the user's prompt.

    length         growth in words; 1 if at least twice as long
    keywords_kept  share of the user's content words that the rewrite keeps
    new_details    number of new content words; 1 from five on
    quality_words  1 if the rewrite adds a quality term ("detailed", "4k") that the user did not use
    structure      1 if it has at least five words and at least half of them are distinct
    """
    old_words, new_words = _words(original), _words(enhanced)
    keywords = _content(old_words)
    added_words = _content(new_words) - set(old_words)
    growth = len(new_words) / max(1, len(old_words)) - 1
    added_terms = set(_QUALITY_WORDS.findall(enhanced.casefold())) - set(
        _QUALITY_WORDS.findall(original.casefold())
    )
    is_sentence = len(new_words) >= MIN_SENTENCE_WORDS and 2 * len(set(new_words)) >= len(new_words)
    return {
        "length": min(1.0, max(0.0, growth)),
        "keywords_kept": len(keywords & set(new_words)) / len(keywords) if keywords else 1.0,
        "new_details": min(1.0, len(added_words) / NUM_NEW_DETAILS),
        "quality_words": float(bool(added_terms)),
        "structure": float(is_sentence),
    }


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


def _content(words: list[str]) -> set[str]:
    return set(words) - _FUNCTION_WORDS
