"""Several prompts of a Qwen2.5-VL, decoded together token by token with a key-value cache.

What: `BatchDecoder`. What not: sampling. Beside `_qwen_module.Decoder`, which shares one prompt out
to a group, this one is for use after training (`rl/enhance.py`): many prompts, one answer each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from rl.policies._qwen_module import QwenModule
from rl.types import TokenBatch


class BatchDecoder:
    """The prompts are read packed; their keys and values are then right-padded into rows, where
    padding is masked out of every later step, so that a row is decoded as it would be alone, but
    for float rounding."""

    def __init__(self, module: QwenModule, batch: TokenBatch) -> None:
        """`batch`: groups of one completion each, an empty one."""
        assert all(group.completion_lens == (0,) for group in batch.groups), "prompts alone"
        self._module = module
        self._batch = batch
        self._prompt_lens = [group.prompt_len for group in batch.groups]
        seen_BT = pad_sequence([torch.ones(length) for length in self._prompt_lens], True)
        self._seen_BT = seen_BT.bool().to(batch.input_ids.device)
        self._cache: Any = None
        positions = batch.model_inputs["position_ids"].split(self._prompt_lens, dim=1)
        self._positions_B = torch.stack([own.max() + 1 for own in positions])

    @torch.no_grad()
    def step(self, token_ids_B: Sequence[int] | None) -> torch.Tensor:
        """Append a token to every row (None: start) -> [B, V] float32 logits of the next one."""
        model = self._module.vl_model
        if token_ids_B is None:
            last_BD = self._read_prompts()
        else:
            ids = torch.tensor(token_ids_B, device=self._seen_BT.device)[:, None]
            self._seen_BT = torch.cat([self._seen_BT, torch.ones_like(ids).bool()], dim=1)
            last_BD = model.model(
                input_ids=ids,
                attention_mask=self._seen_BT[:, None, None],
                position_ids=self._positions_B.expand(3, -1)[..., None],
                past_key_values=self._cache,
                use_cache=True,
            ).last_hidden_state[:, -1]
            self._positions_B = self._positions_B + 1
        logits: torch.Tensor = model.lm_head(last_BD).float()
        return logits

    def _read_prompts(self) -> torch.Tensor:
        """[B, D] states of the prompts' last tokens; fills the cache."""
        out = self._module.backbone(self._batch, use_cache=True)
        self._cache = out.past_key_values
        for layer in self._cache.layers:
            layer.keys, layer.values = self._as_rows(layer.keys), self._as_rows(layer.values)
        ends = [group.start + group.prompt_len - 1 for group in self._batch.groups]
        return out.last_hidden_state[0, ends]

    def _as_rows(self, packed: torch.Tensor) -> torch.Tensor:
        """[1, H, S, D] -> [B, H, T, D], zeros after each prompt."""
        prompts_THD = packed[0].transpose(0, 1).split(self._prompt_lens)
        return pad_sequence(list(prompts_THD), batch_first=True).transpose(1, 2)
