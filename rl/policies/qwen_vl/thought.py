"""Thinking before writing, for the Qwen-VL policies: prompts that ask for it, what it leaves.

What not: where a marker ends (`shared/thought.py`).

Axes: `_B` rows of a micro-batch, `_S` tokens of a packed row, `_D` width of the states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rl.api.policy import ThoughtSection
from rl.api.types import Prompt
from rl.policies.shared import thought
from rl.policies.shared.thought import NO_WORDS, Written

if TYPE_CHECKING:
    from rl.policies.qwen_vl.prompts import QwenPrompts


class Thinking:
    """Of one policy; without a section all that is written is words."""

    def __init__(
        self, prompts: QwenPrompts, section: ThoughtSection | None, stops: Sequence[int]
    ) -> None:
        """`stops`: the policy's stop tokens."""
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

    def read(self, prompt: Prompt, ids: Sequence[int]) -> Written:
        """A completion, or the prompt's own words where there is none. Words of a prompt that asks
        for no thought hold none, whatever they spell."""
        if self._section is not None and prompt.without_thought is not None:
            return thought.read(self._prompts.tokenizer, ids, self._section, self._stops)
        text = self._prompts.text(ids) if ids else prompt.sample.instruction
        return Written(text, "", 0, tuple(ids), None if text else NO_WORDS)

    def drawn_from(self, prompt: Prompt, written: Written) -> tuple[int, ...] | None:
        """See `Action.drawn_from`."""
        return None if prompt.without_thought is None else written.word_ids

    def loss_mask(self, ids: Sequence[int]) -> Sequence[bool]:
        """[T] which tokens of a completion are trained."""
        if self._section is None or self._section.loss == "all":
            return (True,) * len(ids)
        written = thought.read(self._prompts.tokenizer, ids, self._section, self._stops)
        return thought.is_trained(self._section, written.num_thought_tokens, len(ids))
