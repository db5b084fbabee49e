"""Qwen3-VL's forward over prompts with one or two pictures; gives the states for Qwen-Image-2.1.

Legend: B batch, L positions after the system turn, K pictures of a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from transformers import DynamicCache

from tiny_world.builder.image21_models import NUM_PADS
from tiny_world.builder.image21_tokenizer import MERGE, PATCH_PX, SYSTEM_TURN, USER, mark_pictures
from tiny_world.builder.reader import Reader, Reading, pad
from tiny_world.builder.tokenizer import SUFFIX

Pictures = Sequence[np.ndarray]
"""The pictures of one prompt, each [64, 64, 3] uint8."""


def patchify(pictures: Pictures) -> tuple[torch.Tensor, torch.Tensor]:
    """[64, 64, 3] uint8 pictures to (pixel_values, grid), as Qwen3-VL's image processor does."""
    x = torch.as_tensor(np.stack(pictures)).float() / 127.5 - 1
    num, side = len(x), NUM_PADS // 2
    x = x.permute(0, 3, 1, 2).reshape(num, 3, side, MERGE, PATCH_PX, side, MERGE, PATCH_PX)
    x = x.permute(0, 2, 5, 3, 6, 1, 4, 7)  # picture, grid y, x, merge y, x, channel, pixel y, x
    x = x[:, :, :, :, :, :, None].expand(-1, -1, -1, -1, -1, -1, 2, -1, -1)  # a still: 2 frames
    return x.reshape(num * 4 * NUM_PADS, -1), torch.tensor([[1, 2 * side, 2 * side]] * num)


class PicturesReader(Reader):
    """A `Reader` of Qwen3-VL: several pictures per row, `Reading.hidden` BEFORE the last norm."""

    def __init__(self, policy, tokenizer) -> None:
        super().__init__(policy, tokenizer, SYSTEM_TURN)
        self._positions: dict[int, torch.Tensor] = {}

    def prompt_ids(self, instruction: str, num_pictures: int) -> list[int]:
        """The prompt after the system turn, with all image tokens of the pictures."""
        pictures = mark_pictures(num_pictures).replace("<|image_pad|>", "<|image_pad|>" * NUM_PADS)
        return self.tokens(USER + pictures + instruction + SUFFIX)

    def read(
        self, pictures: Sequence[Pictures], instructions: Sequence[str], descriptions: Sequence[str]
    ) -> Reading:
        ids, mask, is_written = self.lay_out(map(len, pictures), instructions, descriptions)
        return Reading(self._forward(pictures, ids), ids, mask, is_written)

    def lay_out(
        self, num_pictures: Iterable[int], instructions: Sequence[str], descriptions: Sequence[str]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(token ids, mask, written), each [B, L], as in `Reading`."""
        prompts = [
            self.prompt_ids(text, num) for text, num in zip(instructions, num_pictures, strict=True)
        ]
        written = [self.tokens(text + "<|im_end|>") if text else [] for text in descriptions]
        return pad(prompts, written, self.tokenizer.pad_token_id)

    def log_probs(self, reading: Reading) -> torch.Tensor:
        normed = self.policy.model.language_model.norm(reading.hidden[:, :-1])
        logits = self.policy.lm_head(normed).float()
        return logits.log_softmax(-1).gather(-1, reading.token_ids[:, 1:, None])[..., 0]

    def look(self, pictures: Pictures) -> torch.Tensor:
        return self._see(pictures).pooler_output.unflatten(0, (len(pictures), -1))

    def readable(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden, hidden.shape[-1:])

    def _see(self, pictures: Pictures):
        pixel_values, grid = patchify(pictures)
        return self.policy.model.visual(pixel_values, grid_thw=grid)

    def _positions_of(self, num_pictures: int, length: int) -> torch.Tensor:
        """[3, prefix + length] M-RoPE positions of any row with `num_pictures` pictures."""
        if num_pictures not in self._positions or self._positions[num_pictures].shape[1] < (
            self.prefix.shape[1] + length
        ):
            filler = "the " * length
            row = torch.cat([self.prefix, torch.tensor([self.prompt_ids(filler, num_pictures)])], 1)
            grid = patchify([np.zeros((64, 64, 3), np.uint8)] * num_pictures)[1]
            types = (row == self.image_id).int()
            positions = self.policy.model.get_rope_index(row, types, image_grid_thw=grid)[0]
            self._positions[num_pictures] = positions[:, 0]
        return self._positions[num_pictures][:, : self.prefix.shape[1] + length]

    def _forward(self, pictures: Sequence[Pictures], token_ids: torch.Tensor) -> torch.Tensor:
        model = self.policy.model
        num, length = token_ids.shape
        is_image = token_ids == self.image_id
        features = self._see([picture for row in pictures for picture in row])
        embeds = model.get_input_embeddings()(token_ids)
        embeds = embeds.masked_scatter(is_image[..., None], features.pooler_output)
        positions = torch.stack([self._positions_of(len(row), length) for row in pictures], 1)
        num_prefix = self.prefix.shape[1]
        cache, last_states = DynamicCache(), []
        model.language_model(
            inputs_embeds=model.get_input_embeddings()(self.prefix),
            position_ids=positions[:, :1, :num_prefix],
            past_key_values=cache,
            use_cache=True,
        )
        for layer in cache.layers:
            layer.keys = layer.keys.expand(num, -1, -1, -1)
            layer.values = layer.values.expand(num, -1, -1, -1)
        hook = model.language_model.norm.register_forward_hook(
            lambda module, inputs, output: last_states.append(inputs[0])
        )
        model.language_model(
            inputs_embeds=embeds,
            position_ids=positions[:, :, num_prefix:],
            past_key_values=cache,
            use_cache=True,
            visual_pos_masks=is_image,
            deepstack_visual_embeds=features.deepstack_features,
        )
        hook.remove()
        return last_states[0]
