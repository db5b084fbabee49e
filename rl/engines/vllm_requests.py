"""What is built on vLLM's own classes: requests, the grammar of image tokens, Qwen3-VL."""

from __future__ import annotations

from collections.abc import Collection
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal

import torch
from vllm.inputs import mm_input, tokens_input
from vllm.model_executor.models.qwen3_vl import Qwen3VLForConditionalGeneration
from vllm.model_executor.models.utils import StageMissingLayer
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems, PlaceholderRange
from vllm.v1.sample.logits_processor import LogitsProcessor as V1LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as V2LogitsProcessor

from rl.api.image_grammar import ANY, NO_IMAGE_YET, allowed_kinds, forced_tokens, mask_logits_
from rl.api.types import Completion, ImageVocabulary, Prompt
from rl.engines.vllm_process import GRID, VOCABULARY
from rl.files import digest

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig
    from vllm.v1.sample.logits_processor import BatchUpdate
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcRequestState

# ---- requests ------------------------------------------------------------------------------------
# Converts prompts to vLLM's inputs and its outputs to completions; tokenises nothing again.


def engine_input(
    prompt: Prompt, features: torch.Tensor | None, image_token_id: int | None, dtype: torch.dtype
) -> Any:
    """vLLM's `EngineInput`.

    `features`: [N, D], one row per image token of the prompt, any float dtype, by the policy's
    vision tower, for an engine without one; None: pixels are passed, in the model's own `dtype`.
    `image_token_id`: its runs in the prompt stand for the pictures; None for models that read ids
    only.
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
        rows_per_picture = grids.prod(-1)  # patches
    else:
        # vLLM expects inputs on the CPU.
        key, values = "image_embeds", features.cpu()
        rows_per_picture = torch.tensor([placeholder.length for placeholder in ranges])
    fields = {
        key: MultiModalFieldConfig.flat_from_sizes("image", rows_per_picture),
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


# ---- grammar -------------------------------------------------------------------------------------
# The image grammar as a logits processor of vLLM: `V1Grammar` for CPUs, `V2Grammar` for GPUs.


def _grid(params: SamplingParams) -> tuple[int, int] | None:
    return (params.extra_args or {}).get(GRID)


def _vocabulary(vllm_config: VllmConfig) -> ImageVocabulary:
    config = vllm_config.additional_config
    assert isinstance(config, dict)
    return ImageVocabulary(**config[VOCABULARY])


class V1Grammar(V1LogitsProcessor):
    """Derives each request's position in the grammar from the list of tokens it has sampled, which
    vLLM extends in place; so preempted requests need no bookkeeping."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._vocabulary = _vocabulary(vllm_config)
        self._device = device
        self._requests: dict[int, tuple[tuple[int, int], list[int]]] = {}
        """Row of the batch -> (grid, sampled tokens)."""

    def is_argmax_invariant(self) -> bool:
        """False: the grammar may forbid the likeliest token."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """vLLM calls this before each step with the rows that entered, left or moved."""
        process_dict_updates(
            self._requests,
            batch_update,
            lambda params, _, outputs: (grid, outputs) if (grid := _grid(params)) else None,
        )

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Mask `logits`, [B, V] float32, in place."""
        if not self._requests:
            return logits
        image = self._vocabulary.image
        positions = [
            (*grid, len(ids) - 1 - ids.index(image) if image in ids else NO_IMAGE_YET)
            for grid, ids in self._requests.values()
        ]
        heights, widths, num_after = torch.tensor(positions).unbind(1)
        kinds = torch.full((logits.shape[0],), ANY)
        kinds[list(self._requests)] = allowed_kinds(num_after, heights, widths, self._vocabulary)
        mask_logits_(logits, kinds.to(self._device), self._vocabulary)
        return logits


class V2Grammar(V2LogitsProcessor):
    """Keeps the position of each request's image token on the device, by request slot; a token's
    position in the grammar is its distance from it. The host never waits for the device.

    Model Runner V2 needs Triton, hence a GPU. Without a GPU the tests call this class directly,
    with the interface's data classes (vLLM 0.32).
    """

    NEVER = 1 << 40
    """Value in `_image_at` until the image token is sampled; larger than every position."""

    def __init__(self, vllm_config: VllmConfig, req_states: LogitsProcRequestState) -> None:
        self._vocabulary = _vocabulary(vllm_config)
        self._states = req_states
        self._device = req_states.device
        num_slots = req_states.max_num_reqs
        self._grids = torch.zeros(2, num_slots, dtype=torch.int64, device=self._device)
        self._image_at = torch.full_like(self._grids[0], self.NEVER)
        self._staged: dict[int, tuple[int, int]] = {}

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """A request enters slot `req_idx`, for the first time or again after a preemption. Returns
        whether the grammar applies to it."""
        grid = _grid(sampling_params)
        self._staged[req_idx] = grid or (0, 0)
        return grid is not None

    def apply_staged_writes(self) -> None:
        """vLLM calls this before each forward. Writes the new slots, and finds the image token
        among the tokens that a preempted request has sampled."""
        if not self._staged:
            return
        slots = torch.tensor(list(self._staged), device=self._device)
        self._grids[:, slots] = torch.tensor(list(self._staged.values()), device=self._device).T
        ids = self._states.all_token_ids.gpu[slots]
        positions = torch.arange(ids.shape[1], device=self._device)
        first, end = (
            bound.gpu[slots, None] for bound in (self._states.prompt_len, self._states.prefill_len)
        )
        is_image = (ids == self._vocabulary.image) & (positions >= first) & (positions < end)
        self._image_at[slots] = torch.where(is_image, positions, self.NEVER).amin(dim=1)
        self._staged.clear()

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        """Mask `logits`, [rows, V] float32, in place; each request has one row."""
        slots = ctx.expanded_idx_mapping.long()
        opens = (ctx.input_ids == self._vocabulary.image) & (
            ctx.pos >= self._states.prompt_len.gpu[slots]
        )
        image_at = torch.minimum(self._image_at[slots], torch.where(opens, ctx.pos, self.NEVER))
        self._image_at[slots] = image_at
        heights, widths = self._grids[:, slots].unbind(0)
        kinds = allowed_kinds(ctx.pos - image_at, heights, widths, self._vocabulary)
        mask_logits_(logits, kinds, self._vocabulary)
        return logits


# ---- qwen3-vl ------------------------------------------------------------------------------------
# Qwen3-VL in vLLM without a vision tower: picture features, deepstack's included, are inputs.


class Qwen3VLWithDeepstack(Qwen3VLForConditionalGeneration):
    """Same as vLLM's own class if the engine has the vision tower.

    Without the tower, vLLM's own class also disables deepstack, although the language model is what
    adds the deepstack features. Features of hidden-state width then give wrong log-probs (1 nat
    off), and features with deepstack crash the engine. `register_in_process` registers this
    class before a model is built, so that CUDA graphs are captured with the buffers in place."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "model") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        if not isinstance(self.visual, StageMissingLayer):
            return
        config = vllm_config.model_config.hf_config
        size = (vllm_config.scheduler_config.max_num_batched_tokens, config.text_config.hidden_size)
        self.use_deepstack = True
        self.deepstack_num_level = len(config.vision_config.deepstack_visual_indexes)
        self.multiscale_dim = self.visual_dim * self.deepstack_num_level
        self.deepstack_input_embeds = [torch.zeros(size) for _ in range(self.deepstack_num_level)]
        self.deepstack_input_embeds_num_tokens = 0
