"""Encodes prompts with Stable Diffusion 3's three text encoders."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from cachetools import LRUCache, cachedmethod

logger = logging.getLogger(__name__)

NUM_KEPT_PROMPTS = 64
"""Encoded prompts cached between batches and calls (2.7 MB each in bfloat16)."""


@dataclass(frozen=True, eq=False)
class TextStates:
    """One prompt, as the transformer reads it."""

    embeds: torch.Tensor
    """[1, 77 + max_t5_tokens, D]: both CLIPs side by side, zero-padded to D; then T5."""
    pooled: torch.Tensor
    """[1, P]: both CLIPs' projections."""
    num_clip_cut: int
    """Tokens beyond CLIP's 77 (markers included), which it did not read; 0 if it read all."""
    num_t5_cut: int
    """Tokens beyond max_t5_tokens, which T5 did not read; 0 if it read all, or without T5."""


@dataclass(frozen=True)
class TextParts:
    """The frozen text encoders with their tokenizers."""

    tokenizers: tuple[Any, Any]
    """CLIPTokenizer of CLIP-L and of CLIP-G."""
    encoders: tuple[Any, Any]
    """CLIPTextModelWithProjection, CLIP-L and CLIP-G."""
    tokenizer_3: Any | None
    """T5 tokenizer; None: the third encoder is left out, and its states are zeros."""
    encoder_3: Any | None
    """T5EncoderModel, or None."""


class PromptEncoder:
    """Encodes prompts as `StableDiffusion3Pipeline.encode_prompt` does for one, bit for bit.

    Each prompt is encoded alone, so that its states do not depend on other prompts and a resumed
    run renders the same bits.
    """

    def __init__(self, parts: TextParts, max_t5_tokens: int, states_dim: int) -> None:
        """`states_dim`: D, the width that the transformer reads."""
        self.parts = parts
        self._max_clip_tokens = parts.tokenizers[0].model_max_length
        self._max_t5_tokens = max_t5_tokens
        self._states_dim = states_dim
        self._cache: LRUCache[str, TextStates] = LRUCache(NUM_KEPT_PROMPTS)
        self._warned = False

    @cachedmethod(lambda self: self._cache, lambda self, prompt: prompt)
    @torch.no_grad()
    def encode(self, prompt: str) -> TextStates:
        """Encode the prompt, unless its states are cached."""
        parts = self.parts
        states, pooled, num_cut = [], [], 0
        for tokenizer, encoder in zip(parts.tokenizers, parts.encoders, strict=True):
            ids, cut = _tokenize(tokenizer, prompt, self._max_clip_tokens)
            output = encoder(ids.to(encoder.device, non_blocking=True), output_hidden_states=True)
            states.append(output.hidden_states[-2])
            pooled.append(output.text_embeds)
            num_cut = max(num_cut, cut)
        clip = torch.cat(states, dim=-1)
        clip = torch.nn.functional.pad(clip, (0, self._states_dim - clip.shape[-1]))
        t5, num_t5_cut = clip.new_zeros(1, self._max_t5_tokens, self._states_dim), 0
        if parts.encoder_3 is not None:
            # Padding is attended to, as in training.
            ids, num_t5_cut = _tokenize(parts.tokenizer_3, prompt, self._max_t5_tokens)
            t5 = parts.encoder_3(ids.to(parts.encoder_3.device, non_blocking=True))[0]
        self._warn(prompt, num_cut, num_t5_cut)
        return TextStates(
            torch.cat([clip, t5], dim=-2), torch.cat(pooled, dim=-1), num_cut, num_t5_cut
        )

    def _warn(self, prompt: str, num_clip_cut: int, num_t5_cut: int) -> None:
        """Warn once per run; the renderer's `take_metrics` counts every such prompt."""
        if self._warned or not (num_clip_cut or num_t5_cut):
            return
        self._warned = True
        reads = "no encoder" if self.parts.encoder_3 is None else "only the third encoder"
        logger.warning(
            "renderer sd3: a prompt has %d tokens beyond CLIP's %d, which %s reads, and %d beyond "
            "renderer.max_t5_tokens=%d; ask for fewer words in policy.system_prompt, or lower "
            "sampling.max_completion_tokens (logged once, counted always). The prompt: %.300s",
            *(num_clip_cut, self._max_clip_tokens, reads),
            *(num_t5_cut, self._max_t5_tokens, prompt),
        )


def _tokenize(tokenizer: Any, prompt: str, length: int) -> tuple[torch.Tensor, int]:
    """([1, length] ids, padded or cut, and how many tokens were cut off)."""
    ids = tokenizer(
        prompt, padding="max_length", max_length=length, truncation=True, return_tensors="pt"
    ).input_ids
    uncut_ids = tokenizer(prompt, verbose=False).input_ids
    return ids, max(0, len(uncut_ids) - length)
