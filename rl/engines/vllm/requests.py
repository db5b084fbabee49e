"""Converts prompts to vLLM's inputs and its outputs to completions; tokenises nothing again."""

from __future__ import annotations

from collections.abc import Collection
from itertools import groupby
from typing import Any, Literal

import torch
from vllm.inputs import mm_input, tokens_input
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange

from rl.algorithm.image_grammar import forced_tokens
from rl.api.types import Completion, ImageVocabulary, Prompt
from rl.files import digest


def engine_input(
    prompt: Prompt, features: torch.Tensor | None, image_token_id: int | None, dtype: torch.dtype
) -> Any:
    """vLLM's `EngineInput`.

    `features`: [N_img, D] of the prompt's pictures by the policy's vision tower, for an engine
    without one; None: pixels are passed, in the model's own `dtype`. `image_token_id`: its runs
    in the prompt stand for the pictures; None for models that read ids only.
    """
    ids = list(prompt.token_ids)
    if not prompt.images:
        return tokens_input(ids)
    assert image_token_id is not None, "the model reads ids only"
    # The engine caches encoded pictures by these names: a group's members share them.
    names = [digest(picture).hex() for picture in prompt.images]
    ranges, offset = [], 0
    for token, run in groupby(ids):
        length = len(list(run))
        if token == image_token_id:
            ranges.append(PlaceholderRange(offset=offset, length=length))
        offset += length
    assert len(ranges) == len(names), "one run of image tokens per picture"
    grids = prompt.model_inputs["image_grid_thw"]
    if features is None:
        key, values = "pixel_values", prompt.model_inputs["pixel_values"].to(dtype)
        lengths = grids.prod(-1)
    else:
        # vLLM expects inputs on the CPU.
        key, values = "image_embeds", features.cpu()
        lengths = torch.tensor([placeholder.length for placeholder in ranges])
    fields = {
        key: MultiModalFieldConfig.flat_from_sizes("image", lengths),
        "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
    }
    inputs = {key: values, "image_grid_thw": grids}
    return mm_input(
        ids,
        mm_kwargs=MultiModalKwargsItems.from_hf_inputs(inputs, fields),
        mm_hashes={"image": names},
        mm_placeholders={"image": ranges},
    )


def completion(
    output: Any,
    stop_ids: Collection[int],
    grid: tuple[int, int] | None,
    vocabulary: ImageVocabulary | None,
) -> Completion:
    """Converts a vLLM `CompletionOutput` with flat log-probs of its sampled tokens. With `grid` and
    `vocabulary` the image grammar enforced a picture of that size."""
    ids = tuple(output.token_ids)
    assert tuple(output.logprobs.token_ids) == ids, "one log-prob for each sampled token"
    forced = forced_tokens(ids, grid, vocabulary) if grid and vocabulary else None
    finish: Literal["stop", "length"] = "stop" if ids[-1] in stop_ids else "length"
    return Completion(ids, tuple(output.logprobs.logprobs), finish, forced)
