"""Prompts for pictures written as tokens, and a reference for their log-probs.

`reference_logprobs` has the grammar as a list and the softmax as a loop, and shares no code with
the engines or the policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tiny_emu3
import torch

from rl.api.types import Completion, ImageVocabulary, Prompt

GRIDS = [(2, 3), (1, 1), (3, 2), (4, 1)]


def build_prompts(policy: Any) -> list[Prompt]:
    """One prompt for each of GRIDS."""
    return [
        policy.build_prompt(tiny_emu3.sample(i, height=height, width=width))
        for i, (height, width) in enumerate(GRIDS)
    ]


def allowed_ids(
    ids: Sequence[int], grid: tuple[int, int], vocabulary: ImageVocabulary
) -> list[Sequence[int]]:
    """The ids from which each token of a completion is drawn; a forced token has only one."""
    height, width = grid
    text = range(vocabulary.visual_start)
    codes = range(vocabulary.visual_start, vocabulary.visual_end)
    begin = ids.index(vocabulary.image) + 1 if vocabulary.image in ids else len(ids)
    rows = ([codes] * width + [[vocabulary.end_of_row]]) * height
    ends = [[vocabulary.end_of_frame], [vocabulary.end_of_image]]
    after = [*rows, *ends, *[[vocabulary.end_of_sequence]] * len(ids)]
    return [*[text] * begin, *after[: len(ids) - begin]]


def expected_forced(
    ids: Sequence[int], grid: tuple[int, int], vocabulary: ImageVocabulary
) -> tuple[bool, ...]:
    """Flags of a complete or cut completion."""
    return tuple(len(allowed) == 1 for allowed in allowed_ids(ids, grid, vocabulary))


@torch.no_grad()
def reference_logprobs(
    model: Any,
    prompt: Prompt,
    completion: Completion,
    vocabulary: ImageVocabulary,
    temperature: float = 1.0,
    top_k: int = -1,
    top_p: float = 1.0,
) -> list[float]:
    """Log-probs from one plain forward of the stock model; -inf for forbidden tokens."""
    ids = completion.token_ids
    logits_TV = model(torch.tensor([prompt.token_ids + ids])).logits[0, :-1].float()
    num_ids = logits_TV.shape[1]
    allowed_T: Sequence[Sequence[int]] = [range(num_ids)] * len(ids)
    if prompt.grid:
        allowed_T = allowed_ids(ids, prompt.grid, vocabulary)
    logprobs = []
    for token, allowed, row_V in zip(
        ids, allowed_T, logits_TV[len(prompt.token_ids) - 1 :], strict=True
    ):
        masked_V = torch.full((num_ids,), float("-inf"))
        masked_V[list(allowed)] = row_V[list(allowed)] / temperature
        probs_V, order = masked_V.softmax(-1).sort(descending=True)
        probs_V = probs_V[: top_k if top_k > 0 else num_ids]
        probs_V = probs_V / probs_V.sum()
        mass_before_V = probs_V.cumsum(-1) - probs_V
        probs_V = probs_V[mass_before_V < top_p]
        probs_V = probs_V / probs_V.sum()
        kept = dict(zip(order.tolist(), probs_V.log().tolist(), strict=False))
        logprobs.append(kept.get(token, float("-inf")))
    return logprobs
