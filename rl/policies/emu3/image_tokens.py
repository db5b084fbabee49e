"""Pictures as Emu3 spells them: codes to token ids and back.

A picture of h x w codes is: image start, 'h*w', image token, h rows of w visual tokens each closed
by end-of-row, end-of-frame, image end; 32 x 32 codes are 1,065 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rl.api.types import ImageVocabulary

if TYPE_CHECKING:
    import numpy as np

BOS, EOS = "<|extra_203|>", "<|extra_204|>"
END_OF_ROW, END_OF_FRAME = "<|extra_200|>", "<|extra_201|>"
IMAGE, IMAGE_START, IMAGE_END = "<|image token|>", "<|image start|>", "<|image end|>"
VISUAL = "<|visual token {:06d}|>"


@dataclass(frozen=True)
class Emu3Vocabulary:
    """The ids with a meaning of their own."""

    picture: ImageVocabulary
    beginning: int
    """Opens every prompt."""
    image_start: int
    """Opens a picture, before its size in words."""


def find_vocabulary(tokenizer: Any) -> Emu3Vocabulary:
    """The ids, by how the tokens are spelt.

    Raises ValueError when a token is missing, or when the visual tokens are not the last ids, in
    the order of their codes.
    """
    known: dict[str, int] = tokenizer.get_vocab()
    names = (BOS, EOS, END_OF_ROW, END_OF_FRAME, IMAGE, IMAGE_START, IMAGE_END, VISUAL.format(0))
    missing = [name for name in names if name not in known]
    if missing:
        raise ValueError(
            f"policy.tokenizer_path: no Emu3 tokenizer, it lacks {', '.join(missing)}; use that of "
            "BAAI/Emu3-Stage1 or BAAI/Emu3-Gen"
        )
    start, end = known[VISUAL.format(0)], max(known.values()) + 1
    for code, token_id in enumerate(range(start, end)):
        if known.get(VISUAL.format(code)) != token_id:
            raise ValueError(
                f"policy.tokenizer_path: id {token_id} should be {VISUAL.format(code)!r}: the "
                "visual tokens must be the vocabulary's last ids, one after the other"
            )
    picture = ImageVocabulary(
        image=known[IMAGE],
        end_of_row=known[END_OF_ROW],
        end_of_frame=known[END_OF_FRAME],
        end_of_image=known[IMAGE_END],
        end_of_sequence=known[EOS],
        visual_start=start,
        visual_end=end,
    )
    return Emu3Vocabulary(picture, known[BOS], known[IMAGE_START])


def picture_ids(codes: np.ndarray, header: Sequence[int], vocabulary: Emu3Vocabulary) -> list[int]:
    """Ids of a whole picture; `codes` [h, w], `header` the ids of 'h*w'.

    Raises ValueError when a code has no token.
    """
    picture = vocabulary.picture
    num_codes = picture.visual_end - picture.visual_start
    if codes.ndim != 2 or codes.size == 0 or codes.min() < 0 or codes.max() >= num_codes:
        spread = f"{codes.min()}..{codes.max()}" if codes.size else "none"
        raise ValueError(
            f"codes must be [h, w] from 0 to {num_codes - 1}, the tokenizer's visual tokens; given "
            f"shape {codes.shape}, codes {spread}"
        )
    ids = [vocabulary.image_start, *header, picture.image]
    for row in (codes.astype("int64") + picture.visual_start).tolist():
        ids += [*row, picture.end_of_row]
    return [*ids, picture.end_of_frame, picture.end_of_image]


@dataclass(frozen=True, eq=False)
class Reading:
    """What a completion holds: words, perhaps a picture, words."""

    before: Sequence[int]
    """Ids up to the image token; all of them where there is none."""
    after: Sequence[int] = ()
    """Ids after the picture."""
    codes: np.ndarray | None = None
    """[h, w] int32; None exactly when `failure` is set."""
    failure: str | None = None


def read_picture(
    token_ids: Sequence[int], grid: tuple[int, int], vocabulary: ImageVocabulary
) -> Reading:
    """The first picture of a completion, which should have `grid` (rows, columns)."""
    import numpy as np

    ids = list(token_ids)
    if not ids or ids == [vocabulary.end_of_sequence]:
        return Reading(ids, failure="empty: the completion holds no tokens")
    if vocabulary.image not in ids:
        return Reading(ids, failure="no image token: the completion holds words alone")
    start = ids.index(vocabulary.image) + 1
    ends = {vocabulary.end_of_frame, vocabulary.end_of_image, vocabulary.end_of_sequence}
    end = next((t for t in range(start, len(ids)) if ids[t] in ends), None)
    rows = _rows(ids[start:end], vocabulary.end_of_row)
    failure = _failure(rows, grid, vocabulary, cut=end is None)
    before, after = ids[: start - 1], [] if end is None else ids[end:]
    if failure:
        return Reading(before, after, failure=failure)
    codes = np.array(rows, dtype=np.int32) - np.int32(vocabulary.visual_start)
    return Reading(before, after, codes)


def _rows(ids: Sequence[int], end_of_row: int) -> list[list[int]]:
    """Split at each end-of-row; nothing after the last one is no row."""
    rows: list[list[int]] = [[]]
    for token_id in ids:
        if token_id == end_of_row:
            rows.append([])
        else:
            rows[-1].append(token_id)
    return rows if rows[-1] else rows[:-1]


def _failure(
    rows: Sequence[Sequence[int]],
    grid: tuple[int, int],
    vocabulary: ImageVocabulary,
    cut: bool,
) -> str | None:
    """Why these rows are no picture of `grid`; the first word is stable, for counting."""
    height, width = grid
    start, end = vocabulary.visual_start, vocabulary.visual_end
    num_strangers = sum(not start <= token_id < end for row in rows for token_id in row)
    if num_strangers:
        return f"strangers: {num_strangers} tokens among the rows are no visual tokens"
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
