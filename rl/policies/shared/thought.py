"""Splits a completion into thought and words, and asks for a thought in the prompt.

The marker is looked for in the decoded text, since it may end inside a token ('</think>' and two
line breaks are three tokens of Qwen2.5's, the last of them '>' with the breaks).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rl.api.policy import ThoughtSection
from rl.api.types import NO_MARKER, UNFINISHED_THOUGHT, Prompt, UnusableSampleError
from rl.policies.shared import prompting


@dataclass(frozen=True)
class Written:
    text: str
    """The whole of it, without special tokens and surrounding white space."""
    thought: str
    """Its beginning, marker and the white space behind it included; '' where there is none."""
    num_thought_tokens: int
    """Those in front of the first that holds anything of the words; all where no marker is."""
    word_ids: tuple[int, ...]
    """The words' ids with the stop token; see `words_behind`."""
    failure: str | None
    """Why there are no words."""

    @property
    def words(self) -> str:
        return self.text.removeprefix(self.thought)


def read(
    tokenizer: Any, ids: Sequence[int], section: ThoughtSection, stops: Sequence[int]
) -> Written:
    """A completion of a policy that was asked to think; `stops`: the stop tokens."""
    whole = _decoded(tokenizer, ids)
    text = whole.strip()
    at = whole.rfind(section.marker)
    if at < 0:
        return _without_marker(text, ids, section, stops)
    end = at + len(section.marker)
    first, word_ids = words_behind(tokenizer, ids, end)
    words = whole[end:].strip()
    failure = None if words else "empty: no words behind the thought"
    if section.max_tokens is not None and first > section.max_tokens:
        failure = (
            f"{UNFINISHED_THOUGHT}: {first} tokens up to its marker, more than "
            f"policy.thought.max_tokens = {section.max_tokens}"
        )
    thought = text.removesuffix(words) if words else text
    return Written(text, thought, first, word_ids, failure)


def words_behind(tokenizer: Any, ids: Sequence[int], end: int) -> tuple[int, tuple[int, ...]]:
    """(how many of `ids` come before the first that holds anything of the words, ids of the words),
    which stand behind the first `end` letters and white space. A first token that holds some of
    either is spelt anew: equal words are equal ids, whatever stood in front of them."""
    first = _num_tokens_of(tokenizer, ids, _decoded(tokenizer, ids)[:end])
    shared, theirs = _decoded(tokenizer, ids[:first])[end:], 0
    if shared.strip():
        first -= 1
        theirs = len(_decoded(tokenizer, [ids[first]])) - len(shared)
    text, after = _whole_letters(tokenizer, ids, first)
    while text and not theirs and not text.strip():
        first = after
        text, after = _whole_letters(tokenizer, ids, first)
    words = text[theirs:].lstrip()
    if not words or words == text:
        return first, tuple(ids[first:])
    return first, (*prompting.plain_ids(tokenizer, words), *ids[after:])


def _whole_letters(tokenizer: Any, ids: Sequence[int], first: int) -> tuple[str, int]:
    """(text of the token at `first` and of those that end its last letter, the first behind them).
    No text: a stop token, or none."""
    for after in range(first + 1, min(first + MAX_BYTES_OF_A_LETTER, len(ids)) + 1):
        text = _decoded(tokenizer, ids[first:after])
        if not text.endswith(PART_OF_A_LETTER):
            return text, after
    return _decoded(tokenizer, ids[first : first + 1]), first + 1


def _without_marker(
    text: str, ids: Sequence[int], section: ThoughtSection, stops: Sequence[int]
) -> Written:
    marker = section.marker
    if section.without_marker == "words":
        return Written(text, "", 0, tuple(ids), None if text else NO_WORDS)
    if not text:
        failure = NO_WORDS
    elif ids and ids[-1] in stops:
        failure = f"{NO_MARKER}: the completion ends without {marker!r} (policy.thought.marker)"
    else:
        failure = (
            f"{UNFINISHED_THOUGHT}: cut off at {len(ids)} tokens without {marker!r} "
            "(sampling.max_completion_tokens)"
        )
    return Written(text, text, len(ids), (), failure)


NO_WORDS = "empty: the completion holds no words"
PART_OF_A_LETTER = "\ufffd"
"""What a token's bytes are decoded to where the letter goes on in the next."""
MAX_BYTES_OF_A_LETTER = 4
"""In UTF-8; a token holds one at least."""


def _num_tokens_of(tokenizer: Any, ids: Sequence[int], beginning: str) -> int:
    """The fewest tokens whose text begins with `beginning`, that of all of them. Bisected: what
    comes later changes no letter of a beginning that is whole."""
    low, high = 0, len(ids)
    while low < high:
        middle = (low + high) // 2
        if _decoded(tokenizer, ids[:middle]).startswith(beginning):
            high = middle
        else:
            low = middle + 1
    return low


def _decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(
        list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    return text


def asked_to_think(
    tokenizer: Any, plain: Prompt, section: ThoughtSection, num_after: int, max_tokens: int
) -> Prompt:
    """`plain` with the section's instruction behind the user's words, in front of its last
    `num_after` tokens, which end the turn. Raises UnusableSampleError for one longer than
    `max_tokens`."""
    asking = instruction_ids(tokenizer, section)
    place = len(plain.token_ids) - num_after
    ids = (*plain.token_ids[:place], *asking, *plain.token_ids[place:])
    # With a marker behind it, it may stand for a thought that was cut.
    longest = len(ids) + len(_marker_ids(tokenizer, section))
    if longest > max_tokens:
        raise UnusableSampleError(
            f"the prompt of sample {plain.sample.id!r} has {longest} tokens with "
            f"policy.thought.instruction and its marker ({longest - len(plain.token_ids)} of "
            f"them), more than policy.max_prompt_tokens = {max_tokens}: raise it, shorten the "
            "instruction, or drop the sample"
        )
    return replace(plain, token_ids=ids, without_thought=plain)


def cut_short(tokenizer: Any, prompt: Prompt, section: ThoughtSection) -> Prompt:
    """A prompt that asks for a thought, with the marker behind it: all that is left are words."""
    ids = (*prompt.token_ids, *_marker_ids(tokenizer, section))
    return replace(prompt.plain, token_ids=ids)


def check_marker(tokenizer: Any, section: ThoughtSection) -> None:
    """Raises ValueError for a marker that is never found in what the policy writes, however it
    spells it: this tokenizer gives another text back."""
    found = _decoded(tokenizer, _marker_ids(tokenizer, section))
    if found != section.marker:
        raise ValueError(
            f"policy.thought.marker: {section.marker!r} is read back as {found!r} by the tokenizer "
            "in policy.model_path, where it is no text but a special token, or letters that it "
            "writes in another form; give one that it keeps, such as 'Answer:'"
        )


def _marker_ids(tokenizer: Any, section: ThoughtSection) -> list[int]:
    return list(tokenizer(section.marker, add_special_tokens=False).input_ids)


def instruction_ids(tokenizer: Any, section: ThoughtSection) -> list[int]:
    """The request for a thought, on a line of its own."""
    if not section.instruction:
        return []
    text = "\n" + section.instruction.replace("{marker}", section.marker)
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def is_trained(section: ThoughtSection, num_thought_tokens: int, num_tokens: int) -> list[bool]:
    """[T] which tokens of a completion `section.loss` names."""
    thought, words = section.loss != "words", section.loss != "thought"
    return [thought] * num_thought_tokens + [words] * (num_tokens - num_thought_tokens)
