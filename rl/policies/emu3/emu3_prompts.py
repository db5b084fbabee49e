"""Converts Emu3's prompts and completions to and from token ids, without weights."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rl.api.types import Action, ImageVocabulary, Prompt, Sample, UnusableSampleError
from rl.policies.shared import prompting

if TYPE_CHECKING:
    import numpy as np

BOS, EOS = "<|extra_203|>", "<|extra_204|>"
END_OF_ROW, END_OF_FRAME = "<|extra_200|>", "<|extra_201|>"
IMAGE, IMAGE_START, IMAGE_END = "<|image token|>", "<|image start|>", "<|image end|>"
VISUAL = "<|visual token {:06d}|>"
_SIZE_AT_END = re.compile(r"\d+\*\d+$")


@dataclass(frozen=True)
class Emu3Vocabulary:
    """The ids of Emu3's special and visual tokens."""

    picture: ImageVocabulary
    beginning: int
    """The first token of every prompt."""
    image_start: int
    """Starts a picture; its size follows as text."""


def find_vocabulary(tokenizer: Any) -> Emu3Vocabulary:
    """Find the ids by the tokens' texts.

    Raises ValueError when a token is missing, or when the visual tokens are not the last ids, in
    the order of their codes.
    """
    id_of: dict[str, int] = tokenizer.get_vocab()
    names = (BOS, EOS, END_OF_ROW, END_OF_FRAME, IMAGE, IMAGE_START, IMAGE_END, VISUAL.format(0))
    missing = [name for name in names if name not in id_of]
    if missing:
        raise ValueError(
            f"policy.tokenizer_path: not an Emu3 tokenizer, it lacks {', '.join(missing)}; use "
            "that of BAAI/Emu3-Stage1 or BAAI/Emu3-Gen"
        )
    start, end = id_of[VISUAL.format(0)], max(id_of.values()) + 1
    for code, token_id in enumerate(range(start, end)):
        if id_of.get(VISUAL.format(code)) != token_id:
            raise ValueError(
                f"policy.tokenizer_path: id {token_id} should be {VISUAL.format(code)!r}: the "
                "visual tokens must be the vocabulary's last ids, one after the other"
            )
    picture = ImageVocabulary(
        image=id_of[IMAGE],
        end_of_row=id_of[END_OF_ROW],
        end_of_frame=id_of[END_OF_FRAME],
        end_of_image=id_of[IMAGE_END],
        end_of_sequence=id_of[EOS],
        visual_start=start,
        visual_end=end,
    )
    return Emu3Vocabulary(picture, id_of[BOS], id_of[IMAGE_START])


class Emu3Prompts:
    """A prompt is: beginning token, the source picture's tokens, instruction, prefill."""

    def __init__(
        self, tokenizer: Any, prefill: str, constrained: bool, max_prompt_tokens: int
    ) -> None:
        """`prefill`: the prompt's last text, which every completion continues. `{height}` and
        `{width}` become the source's rows and columns of codes; special tokens stay special."""
        self.tokenizer = tokenizer
        self.vocabulary = find_vocabulary(tokenizer)
        self._prefill = prefill
        self._constrained = constrained
        self._max_prompt_tokens = max_prompt_tokens
        self._specials = tuple(prompting.special_texts(tokenizer))

    def prompt(self, sample: Sample, max_completion_tokens: float = math.inf) -> Prompt:
        """Raises UnusableSampleError naming the sample when its codes are missing or have no
        tokens, when there are several pictures, when the prompt is too long, or when a picture of
        the source's grid needs more tokens than a completion may have."""
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
            text_ids = prompting.plain_ids(self.tokenizer, sample.instruction)
            text_ids += prompting.ids_of(self.tokenizer, prefill)
        else:
            text_ids = prompting.ids_of(self.tokenizer, sample.instruction + prefill)
        ids = (self.vocabulary.beginning, *picture, *text_ids)
        if len(ids) > self._max_prompt_tokens:
            raise UnusableSampleError(
                f"the prompt of sample {sample.id!r} has {len(ids)} tokens ({len(picture)} of them "
                f"for pictures), more than policy.max_prompt_tokens = {self._max_prompt_tokens}: "
                "raise it, or drop the sample"
            )
        shortest = len(self.picture_completion(codes))
        if shortest > max_completion_tokens:
            raise UnusableSampleError(
                f"a picture of {height} x {width} codes, as sample {sample.id!r} asks for, takes "
                f"{shortest} tokens, more than sampling.max_completion_tokens = "
                f"{max_completion_tokens}: raise it, or drop the sample"
            )
        grid = (height, width) if self._constrained else None
        return Prompt(sample=sample, token_ids=ids, grid=grid)

    def _filled_prefill(self, height: int, width: int) -> str:
        return self._prefill.replace("{height}", str(height)).replace("{width}", str(width))

    def picture_ids(self, codes: np.ndarray) -> list[int]:
        """Ids of the picture `codes` [h, w]: image start, 'h*w', image token, h rows of w visual
        tokens that each end with end-of-row, end-of-frame, image end; 32 x 32 codes are 1,065
        tokens. Raises ValueError if a code has no token."""
        picture = self.vocabulary.picture
        num_codes = picture.visual_end - picture.visual_start
        if codes.ndim != 2 or codes.size == 0 or codes.min() < 0 or codes.max() >= num_codes:
            spread = f"{codes.min()}..{codes.max()}" if codes.size else "none"
            raise ValueError(
                f"codes must be [h, w] from 0 to {num_codes - 1}, the tokenizer's visual tokens; "
                f"given shape {codes.shape}, codes {spread}"
            )
        header = prompting.ids_of(self.tokenizer, "*".join(str(side) for side in codes.shape))
        ids = [self.vocabulary.image_start, *header, picture.image]
        for row in (codes.astype("int64") + picture.visual_start).tolist():
            ids += [*row, picture.end_of_row]
        return [*ids, picture.end_of_frame, picture.end_of_image]

    def completion_ids(self, text: str) -> tuple[int, ...]:
        """Ids of `text` and the stop token."""
        stop = self.vocabulary.picture.end_of_sequence
        return (*prompting.plain_ids(self.tokenizer, text), stop)

    def picture_completion(self, codes: np.ndarray, thought: str = "") -> tuple[int, ...]:
        """Ids of `thought`, the picture and the stop token, as the policy would write them:
        without the part of the picture that the prefill already contains."""
        height, width = codes.shape
        picture = self.picture_ids(codes)
        prefill_ids = prompting.ids_of(self.tokenizer, self._filled_prefill(height, width))
        lengths = range(min(len(prefill_ids), len(picture)), 0, -1)
        num_shared = next((n for n in lengths if prefill_ids[-n:] == picture[:n]), 0)
        thought_ids = prompting.plain_ids(self.tokenizer, thought) if thought else []
        return (*thought_ids, *picture[num_shared:], self.vocabulary.picture.end_of_sequence)

    def action(self, prompt: Prompt, token_ids: Sequence[int]) -> Action:
        """The completion's picture as [h, w] int32 codes, or why there is none."""
        assert prompt.sample.source_codes is not None, "the prompt was built from them"
        height, width = prompt.sample.source_codes.shape
        ids, picture, ids_after = read_picture(token_ids, (height, width), self.vocabulary.picture)
        before, after = self._text(ids), self._text(ids_after)
        if isinstance(picture, str):
            return Action(" ".join(filter(None, (before, after))), None, picture)
        before = _SIZE_AT_END.sub("", before).rstrip()
        thought = f"{before} " if before else ""
        drawn = " ".join(filter(None, (f"[image {height}x{width}]", after)))
        return Action(thought + drawn, picture, None, thought, len(ids) if before else 0)

    def _text(self, token_ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text.strip()


def read_picture(
    token_ids: Sequence[int], grid: tuple[int, int], vocabulary: ImageVocabulary
) -> tuple[list[int], np.ndarray | str, list[int]]:
    """(ids before the image token, all ids if there is none; the first picture as [h, w] int32
    codes, or why it does not fit `grid` (rows, columns); ids after the picture)."""
    import numpy as np

    ids = list(token_ids)
    if not ids or ids == [vocabulary.end_of_sequence]:
        return ids, "empty: the completion holds no tokens", []
    if vocabulary.image not in ids:
        return ids, "no image token: the completion holds words alone", []
    start = ids.index(vocabulary.image) + 1
    ends = {vocabulary.end_of_frame, vocabulary.end_of_image, vocabulary.end_of_sequence}
    end = next((t for t in range(start, len(ids)) if ids[t] in ends), None)
    rows: list[list[int]] = [[]]
    for token_id in ids[start:end]:
        if token_id == vocabulary.end_of_row:
            rows.append([])
        else:
            rows[-1].append(token_id)
    if not rows[-1]:  # an empty rest after the last end-of-row
        rows.pop()
    failure = _failure(rows, grid, vocabulary, cut=end is None)
    before, after = ids[: start - 1], [] if end is None else ids[end:]
    if failure:
        return before, failure, after
    codes = np.array(rows, dtype=np.int32) - np.int32(vocabulary.visual_start)
    return before, codes, after


def _failure(
    rows: Sequence[Sequence[int]], grid: tuple[int, int], vocabulary: ImageVocabulary, cut: bool
) -> str | None:
    """Why `rows` are not a picture of size `grid`; the first word is stable, for counting."""
    height, width = grid
    start, end = vocabulary.visual_start, vocabulary.visual_end
    num_strangers = sum(not start <= token_id < end for row in rows for token_id in row)
    if num_strangers:
        return f"strangers: {num_strangers} tokens among the rows are not visual tokens"
    if cut and (len(rows) < height or len(rows[-1]) < width):
        return f"cut off: the completion ends in row {max(len(rows), 1)} of {height}"
    ragged = sorted({len(row) for row in rows})
    if len(ragged) > 1:
        return f"ragged: rows of {ragged[0]} to {ragged[-1]} visual tokens"
    if len(rows) != height:
        return f"rows: {len(rows)} of them, the source has {height}"
    if ragged != [width]:
        return f"columns: {ragged[0]} of them, the source has {width}"
    return None
