"""One forward of the policy over [prompt + description], cheap because the prefix is shared.

The system prefix (64 tokens for the editor's policy) is the same in all rows and comes before the
picture, so it runs once per batch and its keys and values are shared. The result are the hidden
states after the prefix, which condition the image editor.

Legend: B batch, L positions after the prefix, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import DynamicCache

from tiny_world.builder.models import IMAGE_TOKENS
from tiny_world.builder.tokenizer import IMAGE, PREFIX, SUFFIX

PIXEL_MEAN = torch.tensor([0.48145466, 0.4578275, 0.40821073])
PIXEL_STD = torch.tensor([0.26862954, 0.26130258, 0.27577711])


@dataclass(frozen=True)
class Reading:
    """Input and output of a forward."""

    hidden: torch.Tensor
    """[B, L, HIDDEN] after the final norm."""
    token_ids: torch.Tensor
    """[B, L], right-padded."""
    mask: torch.Tensor
    """[B, L] bool, False on padding."""
    written: torch.Tensor
    """[B, L] bool, True on the description's tokens, the end token included."""


def patchify(pictures: Sequence[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    """[64, 64, 3] uint8 pictures to (pixel_values, grid), as Qwen2VLImageProcessorPil does."""
    x = (torch.as_tensor(np.stack(pictures)).float() / 255 - PIXEL_MEAN) / PIXEL_STD
    num = len(x)
    x = x.permute(0, 3, 1, 2).reshape(num, 3, 4, 2, 8, 4, 2, 8)
    x = x.permute(0, 2, 5, 3, 6, 1, 4, 7)  # picture, grid y, x, merge y, x, channel, pixel y, x
    x = x[:, :, :, :, :, :, None].expand(-1, -1, -1, -1, -1, -1, 2, -1, -1)  # a still: 2 frames
    return x.reshape(num * 64, -1), torch.tensor([[1, 8, 8]] * num)


def pad(
    prompts: Sequence[list[int]], written: Sequence[list[int]], pad_id: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Prompts followed by written tokens, right-padded: (ids, mask, is_written), each [B, L]."""
    rows = [p + w for p, w in zip(prompts, written, strict=True)]
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(r) for r in rows], True, pad_id)
    at = torch.arange(ids.shape[1])
    mask = at < lengths[:, None]
    return ids, mask, mask & (at >= torch.tensor([len(p) for p in prompts])[:, None])


class Reader:
    """Runs the language model after the shared prefix; caches tokenised texts."""

    def __init__(self, policy, tokenizer, prefix: str = PREFIX) -> None:
        self.policy, self.tokenizer = policy, tokenizer
        self.prefix = torch.tensor([tokenizer(prefix).input_ids])
        self.image_id = tokenizer.convert_tokens_to_ids("<|image_pad|>")
        self._tokens_of: dict[str, list[int]] = {}

    def tokens(self, text: str) -> list[int]:
        if text not in self._tokens_of:
            self._tokens_of[text] = self.tokenizer(text).input_ids
        return self._tokens_of[text]

    def prompt(self, instruction: str) -> list[int]:
        """The prompt after the prefix, with all image tokens of the picture."""
        picture = IMAGE.replace("<|image_pad|>", "<|image_pad|>" * IMAGE_TOKENS)
        return self.tokens(picture + instruction + SUFFIX)

    def read(
        self,
        pictures: Sequence[np.ndarray],
        instructions: Sequence[str],
        descriptions: Sequence[str],
    ) -> Reading:
        prompts = [self.prompt(text) for text in instructions]
        written = [self.tokens(text + "<|im_end|>") if text else [] for text in descriptions]
        ids, mask, is_written = pad(prompts, written, self.tokenizer.pad_token_id)
        return Reading(self._forward(pictures, ids), ids, mask, is_written)

    def look(self, pictures: Sequence[np.ndarray]) -> torch.Tensor:
        """[B, image tokens, HIDDEN]: the language model's inputs for each picture."""
        pixel_values, grid = patchify(pictures)
        features = self.policy.model.visual(pixel_values, grid_thw=grid).pooler_output
        return features.unflatten(0, (len(pictures), -1))

    def readable(self, hidden: torch.Tensor) -> torch.Tensor:
        """States for a read-out, with a norm that does not depend on the layer."""
        return hidden

    def _forward(self, pictures, token_ids: torch.Tensor) -> torch.Tensor:
        model = self.policy.model
        num, length = token_ids.shape
        is_image = token_ids == self.image_id
        embeds = model.get_input_embeddings()(token_ids)
        pixel_values, grid = patchify(pictures)
        features = model.visual(pixel_values, grid_thw=grid).pooler_output
        embeds = embeds.masked_scatter(is_image[..., None], features)
        # Every row has the same layout, so all rows have the positions of the first one.
        row = torch.cat([self.prefix, token_ids[:1]], 1)
        types = (row == self.image_id).int()
        positions = model.get_rope_index(row, types, image_grid_thw=grid[:1])[0]
        num_prefix = self.prefix.shape[1]
        cache = DynamicCache()
        model.language_model(
            inputs_embeds=model.get_input_embeddings()(self.prefix),
            position_ids=positions[:, :, :num_prefix],
            past_key_values=cache,
            use_cache=True,
        )
        for layer in cache.layers:
            layer.keys = layer.keys.expand(num, -1, -1, -1)
            layer.values = layer.values.expand(num, -1, -1, -1)
        return model.language_model(
            inputs_embeds=embeds,
            position_ids=positions[:, :, num_prefix:].expand(-1, num, length),
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state

    def log_probs(self, reading: Reading) -> torch.Tensor:
        """[B, L - 1] log-probability of each next token, nats; the mask is `written[:, 1:]`."""
        logits = self.policy.lm_head(reading.hidden[:, :-1]).float()
        return logits.log_softmax(-1).gather(-1, reading.token_ids[:, 1:, None])[..., 0]

    def nll(self, reading: Reading) -> torch.Tensor:
        """[B, L - 1] negative log-probability of the written tokens, 0 elsewhere, nats."""
        return -self.log_probs(reading) * reading.written[:, 1:]

    @torch.no_grad()
    def p_by_kind(self, rows: Iterable[tuple[str, np.ndarray, str, str]]) -> dict[str, float]:
        """Mean probability of the texts, by kind; rows of (kind, picture, instruction, text)."""
        kinds, pictures, instructions, texts = zip(*rows, strict=True)
        by_kind: dict[str, list[float]] = {}
        p_B = (-self.nll(self.read(pictures, instructions, texts)).sum(1)).exp().tolist()
        for kind, p in zip(kinds, p_B, strict=True):
            by_kind.setdefault(kind, []).append(p)
        return {kind: round(float(np.mean(ps)), 3) for kind, ps in sorted(by_kind.items())}
