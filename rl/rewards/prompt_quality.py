"""Five scores for how a prompt was enhanced, computed from the text alone: a diagnostic.

Each score is 0..1 and compares the user's prompt with the policy's rewrite of it:
  length         growth in words; 1 when at least twice as long
  keywords_kept  share of the user's content words that the rewrite keeps
  new_details    number of new content words; 1 from five on
  quality_words  1 if the rewrite adds a quality term ("detailed", "4k") that the user did not write
  structure      1 if it has at least five words and at least half of them are distinct
`total_0_5` is their sum; the reward's value is their mean. They describe what a rewriter does, not
whether the pictures get better: a mere list of such words would score well. Hence `diagnostic`.
"""

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
    """Scores one rewrite."""

    needs = frozenset({"text"})
    reads_thoughts = False
    diagnostic = True
    unit_parts = frozenset({"length", "keywords_kept", "new_details", "quality_words", "structure"})

    async def grade(self, reward_input: RewardInput) -> RewardOutput:
        points = score(reward_input.sample.instruction, reward_input.words)
        total = sum(points.values())
        return RewardOutput(total / len(points), {**points, "total_0_5": total})


def score(original: str, enhanced: str) -> dict[str, float]:
    """The five scores, each 0..1."""
    before, after = _words(original), _words(enhanced)
    keywords = _content(before)
    new = _content(after) - set(before)
    growth = len(after) / max(1, len(before)) - 1
    has_craft = set(_QUALITY_WORDS.findall(enhanced.casefold())) - set(
        _QUALITY_WORDS.findall(original.casefold())
    )
    is_sentence = len(after) >= MIN_SENTENCE_WORDS and 2 * len(set(after)) >= len(after)
    return {
        "length": min(1.0, max(0.0, growth)),
        "keywords_kept": len(keywords & set(after)) / len(keywords) if keywords else 1.0,
        "new_details": min(1.0, len(new) / NUM_NEW_DETAILS),
        "quality_words": float(bool(has_craft)),
        "structure": float(is_sentence),
    }


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


def _content(words: list[str]) -> set[str]:
    return set(words) - _FUNCTION_WORDS
