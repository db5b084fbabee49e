"""Asks for a thought in the prompt, and splits a completion into its thought and its words.

Axes: `_B` rows of a micro-batch, `_T` tokens of a completion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rl.api.policy import ThoughtSection
from rl.api.types import NO_MARKER, UNFINISHED_THOUGHT, Completion, Prompt, Row, UnusableSampleError
from rl.policies.shared import prompting

if TYPE_CHECKING:
    from rl.policies.qwen_vl.qwen_vl_prompts import QwenPrompts

NO_WORDS = "empty: the completion holds no words"


@dataclass(frozen=True)
class Written:
    """A completion, split into its thought and its words."""

    text: str
    """The whole completion, without special tokens and surrounding white space."""
    thought: str
    """The start of `text` up to the marker and the white space after it; '' without a thought."""
    num_thought_tokens: int
    """Number of tokens before the first one that holds part of the words; all of them if there
    is not a marker."""
    word_ids: tuple[int, ...]
    """Ids of the words and the stop token, as `Thinking._words_after` gives them."""
    failure: str | None
    """Why the renderer gets no words."""

    @property
    def words(self) -> str:
        return self.text.removeprefix(self.thought)


class Thinking:
    """Handles one policy's thoughts. Without `policy.thought`, everything it writes is words."""

    def __init__(
        self, prompts: QwenPrompts, section: ThoughtSection | None, renderer_reads_text: bool
    ) -> None:
        """`renderer_reads_text`: it reads no hidden states. Raises ValueError for a marker that
        changes when the tokenizer encodes and decodes it: no completion would match it."""
        self.renderer_reads_text = renderer_reads_text
        self._prompts = prompts
        self._section = section
        self._request_ids: list[int] = []
        self._marker_ids: list[int] = []
        if section is None:
            return
        self._marker_ids = prompting.ids_of(prompts.tokenizer, section.marker)
        if section.instruction:
            request = "\n" + section.instruction.replace("{marker}", section.marker)
            self._request_ids = prompting.ids_of(prompts.tokenizer, request)
        decoded = self._decoded(self._marker_ids)
        if decoded != section.marker:
            raise ValueError(
                f"policy.thought.marker: {section.marker!r} is read back as {decoded!r} by the "
                "tokenizer in policy.model_path: it is a special token, or has characters that the "
                "tokenizer normalises; give a marker that it keeps, such as 'Answer:'"
            )

    def prompt_to_sample(self, plain: Prompt) -> Prompt:
        """The prompt to sample from: `plain` with the request to think inserted after the
        instruction. Raises UnusableSampleError if it is too long."""
        if self._section is None:
            return plain
        end = len(plain.token_ids) - self._prompts.num_tokens_after(plain)
        ids = (*plain.token_ids[:end], *self._request_ids, *plain.token_ids[end:])
        length = len(ids) + len(self._marker_ids)  # as in `cut_short`
        limit = self._prompts.max_prompt_tokens
        if length > limit:
            raise UnusableSampleError(
                f"the prompt of sample {plain.sample.id!r} has {length} tokens with "
                f"policy.thought.instruction and its marker ({length - len(plain.token_ids)} of "
                f"them), more than policy.max_prompt_tokens = {limit}: raise it, shorten the "
                "instruction, or drop the sample"
            )
        return replace(plain, token_ids=ids, without_thought=plain)

    def cut_short(self, prompt: Prompt) -> Prompt | None:
        """A prompt that asks for a thought, with the marker appended: the policy then writes only
        words. None for a prompt that asks for no thought."""
        if prompt.without_thought is None:
            return None
        return replace(prompt.plain, token_ids=(*prompt.token_ids, *self._marker_ids))

    def words_of_cut(self, completion: Completion) -> Completion:
        ids = self._words_after(completion.token_ids, 0)[1]
        return replace(completion, token_ids=ids, logprobs=(0.0,) * len(ids))

    def read(self, prompt: Prompt, ids: Sequence[int]) -> Written:
        """Parse a completion; empty `ids` stand for the instruction. If the prompt asks for no
        thought, the completion has none, even if it contains the marker."""
        if self._section is not None and prompt.without_thought is not None:
            return self.split(ids, self._section)
        text = self._prompts.text(ids) if ids else prompt.sample.instruction
        return Written(text, "", 0, tuple(ids), None if text else NO_WORDS)

    def split(self, ids: Sequence[int], section: ThoughtSection) -> Written:
        """Split a completion at the last marker, which is searched in the decoded text, because it
        may end inside a token ('</think>' and two line breaks are three tokens of Qwen2.5's, the
        last of them '>' with the breaks)."""
        decoded = self._decoded(ids)
        text, marker = decoded.strip(), section.marker
        marker_start = decoded.rfind(marker)
        if marker_start >= 0:
            end = marker_start + len(marker)
            num_before, word_ids = self._words_after(ids, end)
            words = decoded[end:].strip()
            failure = None if words else "empty: no words behind the thought"
            if section.max_tokens is not None and num_before > section.max_tokens:
                failure = (
                    f"{UNFINISHED_THOUGHT}: {num_before} tokens up to its marker, more than "
                    f"policy.thought.max_tokens = {section.max_tokens}"
                )
            thought = text.removesuffix(words) if words else text
            return Written(text, thought, num_before, word_ids, failure)
        if section.without_marker == "words":
            return Written(text, "", 0, tuple(ids), None if text else NO_WORDS)
        if not text:
            failure = NO_WORDS
        elif ids[-1] in self._prompts.stop_ids:
            failure = f"{NO_MARKER}: the completion ends without {marker!r} (policy.thought.marker)"
        else:
            failure = (
                f"{UNFINISHED_THOUGHT}: cut off at {len(ids)} tokens without {marker!r} "
                "(sampling.max_completion_tokens)"
            )
        return Written(text, text, len(ids), (), failure)

    def _words_after(self, ids: Sequence[int], end: int) -> tuple[int, tuple[int, ...]]:
        """(number of tokens before the first one that holds part of the words, ids of the words),
        where the words start after the first `end` characters and white space. If they start inside
        a token, the part up to its end is tokenized again, so that the same words have the same
        ids after any thought."""
        decoded = self._decoded(ids)
        words = decoded[end:].lstrip()
        before = decoded.removesuffix(words)
        low, high = 0, len(ids)
        while low < high:  # the fewest tokens whose text begins with `before`
            middle = (low + high) // 2
            if self._decoded(ids[:middle]).startswith(before):
                high = middle
            else:
                low = middle + 1
        if self._decoded(ids[:low]) == before:
            return low, tuple(ids[low:])
        # Ids that start inside a multi-token character do not decode to a suffix of `words`.
        after = next(n for n in range(low, len(ids) + 1) if words.endswith(self._decoded(ids[n:])))
        beginning = words.removesuffix(self._decoded(ids[after:]))
        retokenized = prompting.plain_ids(self._prompts.tokenizer, beginning)
        return low - 1, (*retokenized, *ids[after:])

    def _decoded(self, ids: Sequence[int]) -> str:
        text: str = self._prompts.tokenizer.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    @property
    def reads_again(self) -> bool:
        """Whether the policy encodes the words again without the thought, for the renderer."""
        return self._section is not None and self._section.states == "words"

    def words_alone(self, rows: Sequence[Row]) -> tuple[list[Row], list[int]]:
        """(rows of each group's distinct words after its plain prompt, [B] each row's index into
        them). A row without words becomes its plain prompt with an empty completion."""
        index_of: dict[tuple[int, tuple[int, ...]], int] = {}
        distinct_rows: list[Row] = []
        index_B = []
        for prompt, ids in rows:
            word_ids = self.read(prompt, ids).word_ids
            key = id(prompt.plain), word_ids
            if key not in index_of:
                index_of[key] = len(distinct_rows)
                distinct_rows.append((prompt.plain, word_ids))
            index_B.append(index_of[key])
        return distinct_rows, index_B

    def unread(self, prompt: Prompt, ids: Sequence[int]) -> tuple[int, int, int]:
        """(first, end, leading): prompt tokens first..end ask for a thought, and the completion's
        first `leading` tokens are the thought. The renderer does not get the states of these
        tokens; the states that it gets attended to them."""
        if prompt.without_thought is None:
            return len(prompt.token_ids), len(prompt.token_ids), 0
        end = len(prompt.token_ids) - self._prompts.num_tokens_after(prompt.plain)
        num_request_tokens = len(prompt.token_ids) - len(prompt.plain.token_ids)
        return end - num_request_tokens, end, self.read(prompt, ids).num_thought_tokens

    def drawn_from(
        self, prompt: Prompt, ids: Sequence[int], written: Written
    ) -> tuple[int, ...] | None:
        """The value of `Action.drawn_from`. For words that attended to a thought, the ids of the
        request come first, so that the result differs from that of equal words without one."""
        if prompt.without_thought is None:
            return None
        if self.renderer_reads_text or self.reads_again:
            return written.word_ids
        return (*self._request_ids, *ids)

    def loss_mask(self, ids: Sequence[int]) -> Sequence[bool]:
        """[T] which tokens of a completion are trained (`policy.thought.loss`)."""
        if self._section is None or self._section.loss == "all":
            return (True,) * len(ids)
        num_thought = self.split(ids, self._section).num_thought_tokens
        thought_trains = self._section.loss == "thought"
        return [thought_trains] * num_thought + [not thought_trains] * (len(ids) - num_thought)
