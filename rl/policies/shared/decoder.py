"""Decodes with the policy's module and a key-value cache, for the engine `transformers`.

Axes: `_P` prompts; `_B` rows in the order of the prompts, those of a prompt adjacent; `_S` packed
tokens; `_T` cached keys; `_H` heads; `_D` width of the states or of a head; `_V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from rl.api.types import TokenBatch


class PackedDecoder:
    """An `rl.api.policy.Decoder`. One packed forward reads the prompts; their keys and values are
    then copied to right-padded rows. Later steps mask the padding, so each row is decoded as it
    would be alone, up to float rounding."""

    def __init__(self, module: Any, batch: TokenBatch, num_rows: int) -> None:
        """`module`: the policy's `TrainedModule`. `batch`: P prompts with empty completions, each
        decoded in `num_rows` rows."""
        assert all(group.completion_lens == (0,) for group in batch.groups), "has a completion"
        self._module = module
        self._model = module.base_model
        self._batch = batch
        self._num_rows = num_rows
        self._prompt_lens = [group.prompt_len for group in batch.groups]
        mask_PT = pad_sequence([torch.ones(length) for length in self._prompt_lens], True)
        self._mask_BT = self._repeat_prompts(mask_PT.bool().to(batch.input_ids.device))
        self._cache: Any = None
        positions = batch.model_inputs["position_ids"].split(self._prompt_lens, dim=-1)
        self._position_B = self._repeat_prompts(torch.stack([ids.max() + 1 for ids in positions]))
        self._position_axes = positions[0].shape[:-1]

    @torch.no_grad()
    def step(self, token_ids_B: Sequence[int] | None) -> torch.Tensor:
        """Append one token to every row (None: read the prompts). Returns [B, V] float32 logits of
        each row's next token."""
        if token_ids_B is None:
            out = self._module.backbone(self._batch, use_cache=True)
            self._cache = out.past_key_values
            for layer in self._cache.layers:
                layer.keys, layer.values = self._as_rows(layer.keys), self._as_rows(layer.values)
            last_tokens = [group.start + group.prompt_len - 1 for group in self._batch.groups]
            last_BD = self._repeat_prompts(out.last_hidden_state[0, last_tokens])
        else:
            ids_B1 = torch.tensor(token_ids_B, device=self._mask_BT.device)[:, None]
            self._mask_BT = torch.cat([self._mask_BT, torch.ones_like(ids_B1).bool()], dim=1)
            out = self._model.model(
                input_ids=ids_B1,
                attention_mask=self._mask_BT[:, None, None],
                position_ids=self._position_B.expand(*self._position_axes, -1)[..., None],
                past_key_values=self._cache,
                use_cache=True,
            )
            self._position_B = self._position_B + 1
            last_BD = out.last_hidden_state[:, -1]
        logits: torch.Tensor = self._model.lm_head(last_BD).float()
        return logits

    def _as_rows(self, packed: torch.Tensor) -> torch.Tensor:
        """[1, H, S, D] -> [B, H, T, D], zeros after each prompt."""
        prompts_THD = packed[0].transpose(0, 1).split(self._prompt_lens)
        padded_PTHD = pad_sequence(list(prompts_THD), batch_first=True)
        return self._repeat_prompts(padded_PTHD.transpose(1, 2))

    def _repeat_prompts(self, tensor_P: torch.Tensor) -> torch.Tensor:
        """[P, ...] -> [B, ...]."""
        return tensor_P.repeat_interleave(self._num_rows, dim=0)
