"""Turns a template, an instruction and pictures into token ids."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from rl.api.types import PromptTemplate, Sample, UnusableSampleError

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE_TOKEN = "<|image_pad|>"
PICTURE = f"<|vision_start|>{IMAGE_TOKEN}<|vision_end|>"
"""What `{image}` becomes; a template may also write the start and end tokens around it."""
_BRACKETED = PICTURE.replace(IMAGE_TOKEN, "{image}")
MAX_PICTURES = 16
"""Maximum number of pictures in a prompt of `chat_template`."""


def chat_template(system_prompt: str) -> PromptTemplate:
    """Qwen's chat format, for renderers without a prompt template; pictures, if there are any, are
    adjacent."""
    system = f"<|im_start|>system\n{system_prompt}<|im_end|>\n" if system_prompt else ""
    user = "<|im_start|>user\n{image}{instruction}<|im_end|>\n<|im_start|>assistant\n"
    return PromptTemplate(system + user, max_pictures=MAX_PICTURES, min_pictures=0)


def sources_of(sample: Sample, max_pictures: int) -> tuple[Image, ...]:
    """Raises UnusableSampleError if the sample has more than `max_pictures` source pictures."""
    if len(sample.sources) > max_pictures:
        raise UnusableSampleError(
            f"sample {sample.id!r} has {len(sample.sources)} source pictures, but this prompt "
            f"shows {max_pictures} at most; give it fewer, or choose a renderer and a policy that "
            "show as many"
        )
    return sample.sources


def for_pictures(template: PromptTemplate, num_pictures: int) -> PromptTemplate:
    """The template of a prompt with `num_pictures` pictures: the tokens of each are in its text."""
    template = spelled_out(template)
    numbers = range(1, num_pictures + 1)
    slots = [template.picture.replace("{number}", str(number)) for number in numbers]
    text = template.text.replace("{image}", template.between_pictures.join(slots))
    return replace(template, text=text)


def spelled_out(template: PromptTemplate) -> PromptTemplate:
    """`template` whose `picture` holds the tokens of a picture, and whose `text` does not."""
    picture = template.picture.replace(_BRACKETED, "{image}").replace("{image}", PICTURE)
    return replace(template, text=template.text.replace(_BRACKETED, "{image}"), picture=picture)


def tokenize(tokenizer: Any, template: PromptTemplate, instruction: str) -> list[int]:
    """Ids of the filled template, as `for_pictures` gives it: ONE image placeholder per picture.

    The instruction never becomes special tokens: '<|im_end|>' in it would otherwise end its turn,
    and '<|image_pad|>' would get a picture. An instruction with such text is tokenised separately,
    and the text as ordinary characters.

    Raises ValueError when the template does not hold `{instruction}` exactly once.
    """
    parts = template.text.split("{instruction}")
    if len(parts) != 2:
        raise ValueError(
            f"the prompt template must hold {{instruction}} exactly once, not {len(parts) - 1} "
            f"times: {template.text!r}"
        )
    before, after = parts
    if not any(token.content in instruction for token in tokenizer.added_tokens_decoder.values()):
        return ids_of(tokenizer, before + instruction + after)
    return ids_of(tokenizer, before) + plain_ids(tokenizer, instruction) + ids_of(tokenizer, after)


def plain_ids(tokenizer: Any, text: str) -> list[int]:
    """Ids of `text` as ordinary text, even where it contains the text of an added token.
    `split_special_tokens` splits only special tokens; this function splits the text of other added
    tokens (such as '</think>')."""
    added_tokens = tokenizer.added_tokens_decoder.values()
    added_texts = [t.content for t in added_tokens if not t.special and len(t.content) > 1]
    cut_points = {
        match.start() + 1
        for token in added_texts
        if token in text
        for match in re.finditer(f"(?={re.escape(token)})", text)
    }
    cuts = [0, *sorted(cut_points), len(text)]
    pieces = [text[start:end] for start, end in pairwise(cuts)]
    ids = tokenizer(pieces, add_special_tokens=False, split_special_tokens=True).input_ids
    return [token_id for piece in ids for token_id in piece]


def banned_ids(tokenizer: Any, vocab_size: int, stop_ids: Sequence[int]) -> tuple[int, ...]:
    """Ids that may not be sampled: special tokens except the stop tokens, and the unused ids at the
    end of the vocabulary, which decode to no text."""
    added = tokenizer.added_tokens_decoder.items()
    specials = {token_id for token_id, token in added if token.special}
    unused = set(range(len(tokenizer), vocab_size))
    return tuple(sorted((specials | unused) - set(stop_ids)))


def num_prefix_tokens(tokenizer: Any, template: PromptTemplate, token_ids: Sequence[int]) -> int:
    """How many leading tokens `template.drop_prefix` has; 64 for Qwen-Image-Edit's template.

    Raises ValueError when the prompt's tokens do not start with the prefix's tokens.
    """
    prefix = ids_of(tokenizer, template.drop_prefix) if template.drop_prefix else []
    if list(token_ids[: len(prefix)]) != prefix:
        raise ValueError(
            f"the template's drop_prefix {template.drop_prefix!r} is not the beginning of its text "
            f"as this tokenizer reads it; end it at a special token or a line break"
        )
    return len(prefix)


def expand_images(token_ids: Sequence[int], image_id: int, lengths: Sequence[int]) -> list[int]:
    """Repeat each placeholder to its picture's number of image tokens.

    Raises ValueError when the numbers of placeholders and pictures differ.
    """
    if list(token_ids).count(image_id) != len(lengths):
        raise ValueError(
            f"{list(token_ids).count(image_id)} image placeholders for {len(lengths)} pictures"
        )
    remaining = iter(lengths)
    expanded: list[int] = []
    for token in token_ids:
        expanded += [token] * (next(remaining) if token == image_id else 1)
    return expanded


def ids_of(tokenizer: Any, text: str) -> list[int]:
    """Ids of `text`, in which special tokens may be written."""
    return list(tokenizer(text, add_special_tokens=False).input_ids)
