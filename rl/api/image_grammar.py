"""The grammar of a picture written as tokens: which ids may come next. Every engine uses it.

In a picture of h x w codes, the k-th token after the image token (k = 0, 1, ...) is:

    k < h (w + 1)       row k // (w + 1), column k % (w + 1): end_of_row at column w, a visual id
                        before it
    k = h (w + 1)       end_of_frame
    k = h (w + 1) + 1   end_of_image
    k > h (w + 1) + 1   end_of_sequence, at which the sampler stops

Axes: `_B` completions decoded together, `_V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rl.api.types import ImageVocabulary

LANGUAGE = -1
"""Any id below `visual_start`: the image token has not been written yet."""
VISUAL = -2
"""Any image code: an id in [visual_start, visual_end)."""
ANY = -3
"""No constraint: the completion has no grid (its height is 0)."""

NO_IMAGE_YET = -1
"""`num_after_image` of a completion whose image token has not been written."""


def allowed_kinds(
    num_after_image: torch.Tensor,
    heights: torch.Tensor,
    widths: torch.Tensor,
    vocabulary: ImageVocabulary,
) -> torch.Tensor:
    """[B] int64: what each completion may write next: a forced id (>= 0), LANGUAGE, VISUAL or ANY.

    `num_after_image` [B] int64: tokens written after the image token, NO_IMAGE_YET before it;
    `heights`, `widths` [B] int64: the grid in codes, height 0 for one without. Elementwise.
    """
    num_in_rows = heights * (widths + 1)
    at_row_end = num_after_image % (widths + 1) == widths
    past_rows = num_after_image - num_in_rows
    kinds = torch.where(at_row_end, vocabulary.end_of_row, VISUAL)
    kinds = torch.where(past_rows == 0, vocabulary.end_of_frame, kinds)
    kinds = torch.where(past_rows == 1, vocabulary.end_of_image, kinds)
    kinds = torch.where(past_rows > 1, vocabulary.end_of_sequence, kinds)
    kinds = torch.where(num_after_image < 0, LANGUAGE, kinds)
    return torch.where(heights == 0, ANY, kinds)


def advance(
    num_after_image: torch.Tensor, token_ids: torch.Tensor, vocabulary: ImageVocabulary
) -> torch.Tensor:
    """[B] int64: `num_after_image` once each completion's `token_ids` [B] int64 is written."""
    starts_picture = (num_after_image == NO_IMAGE_YET) & (token_ids == vocabulary.image)
    return num_after_image + (starts_picture | (num_after_image >= 0)).long()


def mask_logits_(logits_BV: torch.Tensor, kinds: torch.Tensor, vocabulary: ImageVocabulary) -> None:
    """Set to -inf, in place, the logits of all ids that `kinds` [B] (of `allowed_kinds`) forbids.

    A forced id gets logit 0, so that its log-prob is exactly 0 at any temperature and whatever its
    logit bias. Three slices are filled under a [B, 1] condition: no [B, V] mask is allocated, and
    the host never waits for the GPU.
    """
    minus_inf = float("-inf")
    kinds_B1 = kinds[:, None]
    free_B1 = kinds_B1 == ANY
    start, end = vocabulary.visual_start, vocabulary.visual_end
    logits_BV[:, :start].masked_fill_(~(free_B1 | (kinds_B1 == LANGUAGE)), minus_inf)
    logits_BV[:, start:end].masked_fill_(~(free_B1 | (kinds_B1 == VISUAL)), minus_inf)
    logits_BV[:, end:].masked_fill_(~free_B1, minus_inf)
    ids_B1 = kinds_B1.clamp(min=0)
    old_B1 = logits_BV.gather(1, ids_B1)
    logits_BV.scatter_(1, ids_B1, torch.where(kinds_B1 >= 0, torch.zeros_like(old_B1), old_B1))


def forced_tokens(
    token_ids: Sequence[int], grid: tuple[int, int], vocabulary: ImageVocabulary
) -> tuple[bool, ...]:
    """[T] True for each token of a completion that the grammar forced; `grid` (h, w) is that of the
    completion's picture."""
    if vocabulary.image not in token_ids:
        return (False,) * len(token_ids)
    num_before = token_ids.index(vocabulary.image) + 1
    num_after = torch.arange(len(token_ids) - num_before)
    height, width = (torch.full_like(num_after, side) for side in grid)
    forced = allowed_kinds(num_after, height, width, vocabulary) >= 0
    return (False,) * num_before + tuple(forced.tolist())
