"""The one nn.Module of a Qwen2.5-VL policy: a micro-batch in, log-probs and hidden states out.

What: `QwenModule`, whose forward runs the backbone once and projects completion positions only.
Everything happens inside that forward, so that ZeRO can wrap the module. `Decoder` is the same
model token by token. What not: prompts, parsing, the loss. Called by the learner (training), by the
policy (conditioning) and, through it, by the transformers engine.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rl.policies._logprobs import completion_outputs, token_logprobs
from rl.types import TokenBatch, TokenOutputs


class QwenModule(nn.Module):
    """Wraps a (PEFT) `Qwen2_5_VLForConditionalGeneration`."""

    def __init__(
        self, model: Any, adapted: bool, temperature: float, banned_token_ids: tuple[int, ...]
    ) -> None:
        super().__init__()
        self.model = model
        self.adapted = adapted
        self.temperature = temperature
        self.banned_token_ids = banned_token_ids

    @property
    def vl_model(self) -> Any:
        """The transformers model inside; LoRA layers sit in it, so it is never stale."""
        return self.model.get_base_model() if self.adapted else self.model

    def forward(self, batch: TokenBatch) -> TokenOutputs:
        """See `TokenOutputs`; rows are right-padded, a row without completion has no log-probs."""
        return completion_outputs(self._hidden(batch), batch, None, self._logprobs)

    def _logprobs(
        self, hidden_ND: torch.Tensor, token_ids_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        banned = torch.tensor(self.banned_token_ids, device=hidden_ND.device, dtype=torch.int64)
        head = self.vl_model.lm_head
        return token_logprobs(hidden_ND, head, token_ids_N, self.temperature, banned)

    def _hidden(self, batch: TokenBatch) -> torch.Tensor:
        """[B, T, D] post-norm. `mm_token_type_ids` always travels: without it M-RoPE silently
        becomes plain positions, 1.28 nats off."""
        extra: dict[str, Any] = dict(batch.model_inputs)
        pictured = "pixel_values" in extra
        any_pictured = self._any_rank_pictured(pictured)
        if pictured:
            index = extra.pop("image_index")
            grid = extra["image_grid_thw"]
            features = self.encode_images(extra.pop("pixel_values"), grid)
            extra["image_grid_thw"] = grid[index]
            extra["mm_encoder_outputs"] = {"image": _encoded([features[i] for i in index.tolist()])}
        elif any_pictured:
            # Not one feature of the blank enters, but the backward goes the same way as elsewhere.
            extra["mm_encoder_outputs"] = {"image": _encoded([self._encode_blank()[:0]])}
        hidden: torch.Tensor = self.vl_model.model(
            input_ids=batch.input_ids,
            attention_mask=batch.attention_mask,
            use_cache=False,
            **extra,
        ).last_hidden_state
        return hidden

    def _any_rank_pictured(self, pictured: bool) -> bool:
        """Under ZeRO-3 the vision tower's weights are gathered from all ranks, so that a rank whose
        rows show no picture must run it as well, or those whose rows do would wait for ever."""
        visual = self.vl_model.model.visual
        if not any(hasattr(parameter, "ds_id") for parameter in visual.parameters()):
            return pictured
        seen = torch.tensor(int(pictured), device=next(visual.parameters()).device)
        torch.distributed.all_reduce(seen, torch.distributed.ReduceOp.MAX)
        return bool(seen)

    def _encode_blank(self) -> torch.Tensor:
        """[1, D] features of the smallest picture there is, all zeros."""
        visual = self.vl_model.model.visual
        device, side = next(visual.parameters()).device, visual.spatial_merge_size
        embed = visual.patch_embed
        num_values = embed.in_channels * embed.temporal_patch_size * embed.patch_size**2
        pixel_values = torch.zeros(side * side, num_values, device=device)
        return self.encode_images(pixel_values, torch.tensor([[1, side, side]], device=device))[0]

    def encode_images(self, pixel_values: torch.Tensor, grid: torch.Tensor) -> list[torch.Tensor]:
        """Each picture's [N_img, D] features; a group shares its picture, so it is encoded once."""
        trained = any(p.requires_grad for p in self.vl_model.model.visual.parameters())
        with torch.set_grad_enabled(trained and torch.is_grad_enabled()):
            encoded = self.vl_model.model.get_image_features(pixel_values, grid, return_dict=True)
        return list(encoded.pooler_output)


def _encoded(features: list[torch.Tensor]) -> Any:
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    return BaseModelOutputWithPooling(pooler_output=tuple(features))


class Decoder:
    """A group's rows, decoded token by token with a key-value cache; the base of the slow sampler.

    The prompt runs once, alone; its cache is then shared out to the rows.
    """

    def __init__(self, module: QwenModule, batch: TokenBatch, num_rows: int) -> None:
        """`batch`: ONE row, prompt only."""
        assert batch.input_ids.shape[0] == 1, "one prompt"
        self._model = module.vl_model
        self._batch = batch
        self._num_rows = num_rows
        self._cache: Any = None
        self._next_position = 0

    @torch.no_grad()
    def step(self, token_ids_G: list[int] | None) -> torch.Tensor:
        """Append a token to every row (None: start) -> [G, V] float32 logits of the next one."""
        if token_ids_G is None:
            return self._prefill()
        device = self._batch.input_ids.device
        ids = torch.tensor(token_ids_G, device=device)[:, None]
        positions = torch.full((3, self._num_rows, 1), self._next_position, device=device)
        self._next_position += 1
        hidden = self._model.model(
            input_ids=ids, position_ids=positions, past_key_values=self._cache, use_cache=True
        ).last_hidden_state
        return self._model.lm_head(hidden[:, -1]).float()

    def _prefill(self) -> torch.Tensor:
        extra = {k: v for k, v in self._batch.model_inputs.items() if k != "image_index"}
        if "pixel_values" in extra:
            positions, _ = self._model.model.get_rope_index(
                self._batch.input_ids,
                mm_token_type_ids=extra["mm_token_type_ids"],
                image_grid_thw=extra["image_grid_thw"],
            )
            self._next_position = int(positions.max()) + 1
        else:
            self._next_position = self._batch.input_ids.shape[1]
        out = self._model.model(input_ids=self._batch.input_ids, use_cache=True, **extra)
        self._cache = out.past_key_values
        self._cache.batch_repeat_interleave(self._num_rows)
        logits = self._model.lm_head(out.last_hidden_state[:, -1]).float()
        return logits.expand(self._num_rows, -1)
