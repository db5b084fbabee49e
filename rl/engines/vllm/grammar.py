"""The image grammar as a logits processor of vLLM: `V1Grammar` for CPUs, `V2Grammar` for GPUs."""

from __future__ import annotations

from itertools import compress
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.sample.logits_processor import LogitsProcessor as V1LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as V2LogitsProcessor

from rl.algorithm.image_grammar import ANY, NO_IMAGE_YET, grammar_ids, mask_logits_
from rl.api.types import ImageVocabulary
from rl.engines.vllm.vllm_config import GRID, VOCABULARY

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig
    from vllm.v1.sample.logits_processor import BatchUpdate
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, LogitsProcRequestState

_newest = itemgetter(-1)


def _grid(params: SamplingParams) -> tuple[int, int] | None:
    return (params.extra_args or {}).get(GRID)


def _validate_grid(params: SamplingParams) -> None:
    """Raise ValueError unless it is two positive whole numbers; later an exception ends the run."""
    grid = _grid(params)
    if grid is None:
        return
    if not (
        isinstance(grid, list | tuple)
        and len(grid) == 2
        and all(isinstance(side, int) and side > 0 for side in grid)
    ):
        raise ValueError(f"{GRID} is [h, w] in codes, both at least 1, not {grid!r}")


def _vocabulary(vllm_config: VllmConfig) -> ImageVocabulary:
    config = vllm_config.additional_config
    assert isinstance(config, dict)
    return ImageVocabulary(**config[VOCABULARY])


class V1Grammar(V1LogitsProcessor):
    """Reads each step's place in the grammar off the lengths of the requests' own output lists.

    That needs no bookkeeping across a preemption or a prompt cut in two; what happens per row and
    step is two C-level passes (`len`, last element), everything else is arrays.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._vocabulary = _vocabulary(vllm_config)
        self._device = device
        self._requests: dict[int, tuple[tuple[int, int], list[int]]] = {}

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        _validate_grid(sampling_params)

    def is_argmax_invariant(self) -> bool:
        """It forbids the likeliest token where the grammar does."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Before each step; rebuilds the arrays when the batch's rows changed."""
        changed = process_dict_updates(
            self._requests,
            batch_update,
            lambda params, _, outputs: (grid, outputs) if (grid := _grid(params)) else None,
        )
        if not changed or not self._requests:
            return
        self._rows = torch.tensor(list(self._requests))
        self._outputs = [outputs for _, outputs in self._requests.values()]
        grids = torch.tensor([grid for grid, _ in self._requests.values()])
        self._heights, self._widths = grids.unbind(1)
        image = self._vocabulary.image
        # [rows] where the image token lies in a row's output, NO_IMAGE_YET before it is written.
        self._image_at = np.array(
            [ids.index(image) if image in ids else NO_IMAGE_YET for ids in self._outputs]
        )

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """[B, V] float32, in place."""
        if not self._requests:
            return logits
        num_after = torch.from_numpy(self._num_after_image())
        kinds = torch.full((logits.shape[0],), ANY)
        kinds[self._rows] = grammar_ids(num_after, self._heights, self._widths, self._vocabulary)
        mask_logits_(logits, kinds.to(self._device), self._vocabulary)
        return logits

    def _num_after_image(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        lengths = np.fromiter(map(len, self._outputs), np.int64, len(self._outputs))
        started = lengths > 0
        newest = np.full_like(lengths, -1)
        newest[started] = np.fromiter(
            map(_newest, compress(self._outputs, started)), np.int64, int(started.sum())
        )
        opens = newest == self._vocabulary.image
        self._image_at[opens] = lengths[opens] - 1
        return np.where(self._image_at == NO_IMAGE_YET, NO_IMAGE_YET, lengths - 1 - self._image_at)


class V2Grammar(V2LogitsProcessor):
    """Keeps, on the device and by request slot, where the image token lies; a step reads its place
    in the grammar off the position it is at. Nothing in a step waits for the device.

    Model Runner V2 needs Triton, hence a GPU: where there is none, the tests drive this class with
    the interface's own records, filled by hand (vLLM 0.32), and not through the runner.
    """

    NEVER = 1 << 40
    """`image_at` before the image token is written: past every position."""

    def __init__(self, vllm_config: VllmConfig, req_states: LogitsProcRequestState) -> None:
        self._vocabulary = _vocabulary(vllm_config)
        self._states = req_states
        self._device = req_states.device
        num_slots = req_states.max_num_reqs
        self._held = np.zeros(num_slots, dtype=bool)
        self._grids = torch.zeros(2, num_slots, dtype=torch.int64, device=self._device)
        self._image_at = torch.full_like(self._grids[0], self.NEVER)
        self._staged: dict[int, tuple[int, int]] = {}

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        _validate_grid(sampling_params)

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """A request enters slot `req_idx`, for the first time or again after a preemption."""
        grid = _grid(sampling_params)
        self._held[req_idx] = grid is not None
        self._staged[req_idx] = grid or (0, 0)
        return grid is not None

    def apply_staged_writes(self) -> None:
        """Before each forward: write the new slots, and look for the image token in what a
        preempted request had written already."""
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
        """[rows, V] float32, in place; one row a request."""
        if not self._held[ctx.idx_mapping_np].any():
            return logits
        slots = ctx.expanded_idx_mapping.long()
        opens = (ctx.input_ids == self._vocabulary.image) & (
            ctx.pos >= self._states.prompt_len.gpu[slots]
        )
        image_at = torch.minimum(self._image_at[slots], torch.where(opens, ctx.pos, self.NEVER))
        self._image_at[slots] = image_at
        heights, widths = self._grids[:, slots].unbind(0)
        kinds = grammar_ids(ctx.pos - image_at, heights, widths, self._vocabulary)
        mask_logits_(logits, kinds, self._vocabulary)
        return logits
