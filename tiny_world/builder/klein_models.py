"""FLUX.2-klein's classes at tiny size, and its forward over a batch of edits.

Legend: B batch, N tokens of one picture (4 x 4), C channels of a token, L text positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from diffusers import (
    AutoencoderKLFlux2,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Transformer2DModel,
)
from transformers import Qwen3Config, Qwen3ForCausalLM

from tiny_world.builder.language import special_tokens
from tiny_world.builder.models import to_tensor, unit_gain
from tiny_world.images_server import OUT_LAYERS, TEXT_TOKENS
from tiny_world.scenes import IMAGE_SIDE_PX

LATENT_CHANNELS = 6
TOKEN_SIDE = 4
"""Tokens along a side of a picture."""
TEXT_WIDTH, TEXT_LAYERS = 48, 2
SOURCE_TIME = 10
"""Position of the first source picture on the time axis, as in the pipeline."""


def make_vae() -> AutoencoderKLFlux2:
    """8x down; the pipeline folds 2 x 2 latents into a token, so a 64x64 picture has 16 tokens."""
    return AutoencoderKLFlux2(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8, 12, 16, 16),
        decoder_block_out_channels=(8, 16, 24, 24),
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=4,
        sample_size=IMAGE_SIDE_PX,
        mid_block_add_attention=False,
    )


def make_transformer() -> Flux2Transformer2DModel:
    return Flux2Transformer2DModel(
        patch_size=1,
        in_channels=4 * LATENT_CHANNELS,
        num_layers=1,
        num_single_layers=3,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=len(OUT_LAYERS) * TEXT_WIDTH,
        timestep_guidance_channels=32,
        mlp_ratio=2.0,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=False,
    )


def make_text_encoder(tokenizer) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=TEXT_WIDTH,
        intermediate_size=64,
        num_hidden_layers=TEXT_LAYERS,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        **special_tokens(tokenizer)[1],
    )
    encoder = Qwen3ForCausalLM(config)
    unit_gain(encoder)
    return encoder


def make_pipeline(vae, text_encoder, tokenizer, transformer) -> Flux2KleinPipeline:
    """As published for few steps: without guidance."""
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    pipeline = Flux2KleinPipeline(
        scheduler, vae, text_encoder, tokenizer, transformer, is_distilled=True
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def latent_stats(vae) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation by channel of a token, each [1, C, 1, 1]."""
    mean, variance = (x.view(1, -1, 1, 1) for x in (vae.bn.running_mean, vae.bn.running_var))
    return mean, (variance + vae.config.batch_norm_eps).sqrt()


@torch.no_grad()
def encode(vae, pictures: Sequence[np.ndarray]) -> torch.Tensor:
    """[64, 64, 3] uint8 pictures to normalised tokens [B, N, C]."""
    mean, std = latent_stats(vae)
    latents = fold(vae.encode(to_tensor(pictures)).latent_dist.mode())
    return ((latents - mean) / std).flatten(2).transpose(1, 2)


def decode(vae, tokens: torch.Tensor) -> torch.Tensor:
    """Normalised tokens [B, N, C] to pictures [B, 3, 64, 64] in about -1..1."""
    mean, std = latent_stats(vae)
    latents = tokens.transpose(1, 2).unflatten(2, (TOKEN_SIDE, TOKEN_SIDE)) * std + mean
    return vae.decode(Flux2KleinPipeline._unpatchify_latents(latents)).sample


def fold(latents: torch.Tensor) -> torch.Tensor:
    """[B, C / 4, 8, 8] latents to [B, C, 4, 4], as the pipeline does it."""
    return Flux2KleinPipeline._patchify_latents(latents)


class Words:
    """Texts to the text encoder's input, in the pipeline's chat template; caches them."""

    def __init__(self, tokenizer) -> None:
        self.tokenizer = tokenizer
        self._of: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, texts: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """(ids, attention mask), both [B, TEXT_TOKENS] int64."""
        rows = [self._row(text) for text in texts]
        ids, masks = zip(*rows, strict=True)
        return torch.stack(ids), torch.stack(masks)

    def _row(self, text: str) -> tuple[torch.Tensor, torch.Tensor]:
        if text not in self._of:
            chat = self.tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
            )
            options = {"padding": "max_length", "max_length": TEXT_TOKENS, "truncation": True}
            row = self.tokenizer(chat, return_tensors="pt", **options)
            self._of[text] = row.input_ids[0], row.attention_mask[0]
        return self._of[text]


def condition(text_encoder, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[B, L, 3 TEXT_WIDTH], as the pipeline makes them."""
    states = text_encoder.model(
        input_ids=ids, attention_mask=mask, output_hidden_states=True, use_cache=False
    ).hidden_states
    return torch.cat([states[layer] for layer in OUT_LAYERS], -1)


def velocity(transformer, xt: torch.Tensor, t: torch.Tensor, source, embeds) -> torch.Tensor:
    """The velocity [B, N, C] of xt at times t [B], 0..1; source [B, N, C]; embeds [B, L, D]."""
    side, zero = torch.arange(TOKEN_SIDE), torch.zeros(1, dtype=torch.long)
    # (time, row, column, word) of each token
    pictures = [torch.cartesian_prod(zero + time, side, side, zero) for time in (0, SOURCE_TIME)]
    words = torch.cartesian_prod(zero, zero, zero, torch.arange(embeds.shape[1]))
    return transformer(
        hidden_states=torch.cat([xt, source], 1),
        timestep=t,
        encoder_hidden_states=embeds,
        txt_ids=words,
        img_ids=torch.cat(pictures),
        return_dict=False,
    )[0][:, : xt.shape[1]]
