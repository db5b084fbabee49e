"""Emu3's prompts and completions as token ids, without weights."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rl.api.types import Action, Prompt, Sample, UnusableSampleError
from rl.policies.emu3 import image_tokens
from rl.policies.shared import prompting

if TYPE_CHECKING:
    import numpy as np

SIZE_IN_WORDS = re.compile(r"\d+\*\d+$")


class Emu3Prompts:
    """A prompt is the beginning token, the source's codes, the instruction and the prefill."""

    def __init__(
        self, tokenizer: Any, prefill: str, constrained: bool, max_prompt_tokens: int
    ) -> None:
        """`prefill`: what every completion continues; `{height}` and `{width}` stand for the
        source's rows and columns of codes, and special tokens spelt in it are special."""
        self.tokenizer = tokenizer
        self.vocabulary = image_tokens.find_vocabulary(tokenizer)
        self._prefill = prefill
        self._constrained = constrained
        self._max_prompt_tokens = max_prompt_tokens
        self._specials = tuple(prompting.special_texts(tokenizer))

    def prompt(self, sample: Sample) -> Prompt:
        """Raises ValueError naming the sample when its codes are missing or have no tokens, when
        there are several pictures, or when the prompt is too long."""
        prompting.sources_of(sample, 1)
        if sample.source_codes is None:
            raise UnusableSampleError(
                f"sample {sample.id!r} has no source_codes, and Emu3 reads its picture as codes: "
                "tokenise the data with rl prepare"
            )
        codes = sample.source_codes
        try:
            picture = self.picture_ids(codes)
        except ValueError as error:
            raise UnusableSampleError(
                f"the source picture of sample {sample.id!r}: {error}"
            ) from error
        height, width = codes.shape
        prefill = self._filled_prefill(height, width)
        if any(special in sample.instruction for special in self._specials):
            words = prompting.plain_ids(self.tokenizer, sample.instruction)
            words += prompting.ids_of(self.tokenizer, prefill)
        else:
            words = prompting.ids_of(self.tokenizer, sample.instruction + prefill)
        ids = (self.vocabulary.beginning, *picture, *words)
        if len(ids) > self._max_prompt_tokens:
            raise UnusableSampleError(
                f"the prompt of sample {sample.id!r} has {len(ids)} tokens ({len(picture)} of them "
                f"picture), more than policy.max_prompt_tokens = {self._max_prompt_tokens}: raise "
                "it, or drop the sample"
            )
        grid = (height, width) if self._constrained else None
        return Prompt(sample=sample, token_ids=ids, grid=grid)

    def _filled_prefill(self, height: int, width: int) -> str:
        return self._prefill.replace("{height}", str(height)).replace("{width}", str(width))

    def picture_ids(self, codes: np.ndarray) -> list[int]:
        """Ids of a whole picture, from image start to image end."""
        header = prompting.ids_of(self.tokenizer, "*".join(str(side) for side in codes.shape))
        return image_tokens.picture_ids(codes, header, self.vocabulary)

    def completion_ids(self, text: str) -> tuple[int, ...]:
        """Ids of plain words and the stop token."""
        stop = self.vocabulary.picture.end_of_sequence
        return (*prompting.plain_ids(self.tokenizer, text), stop)

    def picture_completion(self, codes: np.ndarray, thought: str = "") -> tuple[int, ...]:
        """Ids of `thought`, the picture and the stop token, as the policy would write them: what
        of the picture the prefill has begun already is left out."""
        height, width = codes.shape
        picture = self.picture_ids(codes)
        begun = prompting.ids_of(self.tokenizer, self._filled_prefill(height, width))
        lengths = range(min(len(begun), len(picture)), 0, -1)
        shared = next((n for n in lengths if begun[-n:] == picture[:n]), 0)
        words = prompting.plain_ids(self.tokenizer, thought) if thought else []
        return (*words, *picture[shared:], self.vocabulary.picture.end_of_sequence)

    def action(self, prompt: Prompt, token_ids: Sequence[int]) -> Action:
        """The completion's picture as [h, w] int32 codes, or why there is none."""
        assert prompt.sample.source_codes is not None, "the prompt was built from them"
        height, width = prompt.sample.source_codes.shape
        reading = image_tokens.read_picture(token_ids, (height, width), self.vocabulary.picture)
        before, after = self._text(reading.before), self._text(reading.after)
        if reading.codes is None:
            return Action(" ".join(filter(None, (before, after))), None, reading.failure)
        before = SIZE_IN_WORDS.sub("", before).rstrip()
        thought = f"{before} " if before else ""
        drawn = " ".join(filter(None, (f"[image {height}x{width}]", after)))
        num_tokens = len(reading.before) if before else 0
        return Action(thought + drawn, reading.codes, None, thought, num_tokens)

    def _text(self, token_ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text.strip()
