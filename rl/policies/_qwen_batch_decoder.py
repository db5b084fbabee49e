"""Several prompts of a Qwen2.5-VL, decoded together token by token with a key-value cache.

What: `BatchDecoder`. What not: sampling. Beside `_qwen_module.Decoder`, which shares one prompt out
to a group, this one is for use after training (`rl/enhance.py`): many prompts, one answer each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rl.policies._qwen_module import QwenModule
from rl.types import TokenBatch


class BatchDecoder:
    """Right-padded prompts with their own positions: padding is masked out of every later step, so
    a row is decoded as it would be alone, but for float rounding."""

    def __init__(self, module: QwenModule, batch: TokenBatch) -> None:
        """`batch`: rows without completion; a picture belongs to one row only."""
        self._model = module.vl_model
        self._batch = batch
        self._mask = batch.attention_mask
        self._cache: Any = None
        self._positions = batch.prompt_lens

    @torch.no_grad()
    def step(self, token_ids_B: Sequence[int] | None) -> torch.Tensor:
        """Append a token to every row (None: start) -> [B, V] float32 logits of the next one."""
        if token_ids_B is None:
            return self._prefill()
        ids = torch.tensor(token_ids_B, device=self._mask.device)[:, None]
        self._mask = torch.cat([self._mask, torch.ones_like(ids)], dim=1)
        hidden = self._model.model(
            input_ids=ids,
            attention_mask=self._mask,
            position_ids=self._positions.expand(3, -1)[..., None],
            past_key_values=self._cache,
            use_cache=True,
        ).last_hidden_state
        self._positions = self._positions + 1
        return self._model.lm_head(hidden[:, -1]).float()

    def _prefill(self) -> torch.Tensor:
        batch = self._batch
        extra = {name: t for name, t in batch.model_inputs.items() if name != "image_index"}
        positions, _ = self._model.model.get_rope_index(
            batch.input_ids,
            mm_token_type_ids=extra["mm_token_type_ids"],
            image_grid_thw=extra.get("image_grid_thw"),
            attention_mask=batch.attention_mask,
        )
        valid = batch.attention_mask.bool()
        self._positions = positions.masked_fill(~valid, -1).amax(dim=(0, 2)) + 1
        out = self._model.model(
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask,
            position_ids=positions,
            use_cache=True,
            **extra,
        )
        self._cache = out.past_key_values
        rows = torch.arange(len(batch.prompt_lens), device=valid.device)
        last = out.last_hidden_state[rows, batch.prompt_lens - 1]
        return self._model.lm_head(last).float()
