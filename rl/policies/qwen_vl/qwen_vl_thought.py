"""Thinking before writing, for the Qwen-VL policies: their prompts, and what follows the thought.

Axes: `_B` rows of a micro-batch, `_T` tokens of a completion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rl.api.policy import ThoughtSection
from rl.api.types import Completion, Prompt, Row
from rl.policies.shared import thought
from rl.policies.shared.thought import NO_WORDS, Written

if TYPE_CHECKING:
    from rl.policies.qwen_vl.qwen_vl_prompts import QwenPrompts


class Thinking:
    """One policy's; without a section everything written is words."""

    def __init__(
        self,
        prompts: QwenPrompts,
        section: ThoughtSection | None,
        stops: Sequence[int],
        hands_on_words: bool,
    ) -> None:
        """`stops`: the policy's stop tokens; `hands_on_words`: to a renderer of words, not of
        states."""
        self.hands_on_words = hands_on_words
        self._prompts = prompts
        self._section = section
        self._stops = stops

    def asked(self, plain: Prompt) -> Prompt:
        """`plain` as the policy samples under it. Raises UnusableSampleError: it is too long."""
        if self._section is None:
            return plain
        return thought.asked_to_think(
            self._prompts.tokenizer,
            plain,
            self._section,
            self._prompts.num_tokens_after(plain),
            self._prompts.max_prompt_tokens,
        )

    def cut_short(self, prompt: Prompt) -> Prompt | None:
        if self._section is None or prompt.without_thought is None:
            return None
        return thought.cut_short(self._prompts.tokenizer, prompt, self._section)

    def words_of_cut(self, completion: Completion) -> Completion:
        ids = thought.words_behind(self._prompts.tokenizer, completion.token_ids, 0)[1]
        return replace(completion, token_ids=ids, logprobs=(0.0,) * len(ids))

    def read(self, prompt: Prompt, ids: Sequence[int]) -> Written:
        """A completion, or the prompt's own words where there is none. Words of a prompt that asks
        for no thought hold none, whatever they spell."""
        if self._section is not None and prompt.without_thought is not None:
            return thought.read(self._prompts.tokenizer, ids, self._section, self._stops)
        text = self._prompts.text(ids) if ids else prompt.sample.instruction
        return Written(text, "", 0, tuple(ids), None if text else NO_WORDS)

    @property
    def reads_again(self) -> bool:
        """Whether the renderer's states are those of the words without the thought."""
        return self._section is not None and self._section.states == "words"

    def words_alone(self, rows: Sequence[Row]) -> tuple[list[Row], list[int]]:
        """(each group's different words behind its plain prompt, _B which of these a row's are).
        One without words is its prompt alone."""
        places: dict[tuple[int, tuple[int, ...]], int] = {}
        alone: list[Row] = []
        places_B = []
        for prompt, ids in rows:
            word_ids = self.read(prompt, ids).word_ids
            key = id(prompt.plain), word_ids
            if key not in places:
                places[key] = len(alone)
                alone.append((prompt.plain, word_ids))
            places_B.append(places[key])
        return alone, places_B

    def unread(self, prompt: Prompt, ids: Sequence[int]) -> tuple[int, int, int]:
        """(first, end, leading): which of the prompt's tokens ask for a thought, and how many of
        the completion's are it. Their states go to nobody, the others' attended to them."""
        if prompt.without_thought is None:
            return len(prompt.token_ids), len(prompt.token_ids), 0
        end = len(prompt.token_ids) - self._prompts.num_tokens_after(prompt.plain)
        asking = len(prompt.token_ids) - len(prompt.plain.token_ids)
        return end - asking, end, self.read(prompt, ids).num_thought_tokens

    def drawn_from(
        self, prompt: Prompt, ids: Sequence[int], written: Written
    ) -> tuple[int, ...] | None:
        """See `Action.drawn_from`. Words that attended to their thought are told from the bare
        arm's by what asked for it."""
        if prompt.without_thought is None or self._section is None:
            return None
        if self.hands_on_words or self.reads_again:
            return written.word_ids
        return (*thought.instruction_ids(self._prompts.tokenizer, self._section), *ids)

    def loss_mask(self, ids: Sequence[int]) -> Sequence[bool]:
        """[T] which tokens of a completion are trained."""
        if self._section is None or self._section.loss == "all":
            return (True,) * len(ids)
        written = thought.read(self._prompts.tokenizer, ids, self._section, self._stops)
        return thought.is_trained(self._section, written.num_thought_tokens, len(ids))
