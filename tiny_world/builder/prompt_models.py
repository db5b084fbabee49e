"""The real classes of prompt enhancement at tiny size: Stable Diffusion 3's parts, and CLIP.

Legend: B batch, L text positions (the features of the two encoders are concatenated).
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, SD3Transformer2DModel
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    CLIPConfig,
    CLIPModel,
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
)

from tiny_world.builder.language import vocabulary
from tiny_world.captions import Wish, all_wishes, caption, scene_of, user_prompts
from tiny_world.scenes import BACKGROUNDS_RGB, IMAGE_SIDE_PX, JITTER_PX, draw_array

MAX_TEXT_TOKENS, T5_TOKENS = 77, 1  # as the real one, but without T5, whose states are zeros
TEXT_WIDTH, TRANSFORMER_HEADS, HEAD_WIDTH = 32, 4, 16
LATENT_CHANNELS, LATENT_SIDE = 4, 8
SCHEDULER = {"num_train_timesteps": 1000, "shift": 3.0}  # as stable-diffusion-3-medium's


def make_clip_tokenizer() -> CLIPTokenizer:
    """Each word of captions and users' prompts is one token; other words are split into letters."""
    corpus = [prompt.text for held_out in (False, True) for prompt in user_prompts(held_out)]
    corpus += [caption(wish) for wish in all_wishes()]
    bpe = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    bpe.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+"), behavior="removed")
    letters = [*"abcdefghijklmnopqrstuvwxyz0123456789.,;:!?'-"]
    trainer = trainers.BpeTrainer(
        vocab_size=1000, initial_alphabet=letters, end_of_word_suffix="</w>", show_progress=False
    )
    bpe.train_from_iterator(corpus, trainer)
    learnt = json.loads(bpe.to_str())["model"]
    merges = [tuple(merge) for merge in learnt["merges"]]
    # The trainer numbers the letters that end a word in a random order, so they are sorted here.
    ends = {f"{letter}</w>" for letter in letters}
    used_ends = sorted(ends & learnt["vocab"].keys())
    merged = ["".join(merge) for merge in merges]
    specials = ["<|startoftext|>", "<|endoftext|>"]
    pieces = [*letters, *used_ends, *merged, *sorted(ends - set(used_ends)), *specials]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=MAX_TEXT_TOKENS)


def _text_config(tokenizer: CLIPTokenizer, width: int, layers: int, projection: int):
    return {
        **vocabulary(tokenizer),
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 16,
        "projection_dim": projection,
        "max_position_embeddings": MAX_TEXT_TOKENS,
    }


def make_text_encoder(tokenizer: CLIPTokenizer, layers: int = 2) -> CLIPTextModelWithProjection:
    """Stable Diffusion 3 conditions on the states before the last layer."""
    text = _text_config(tokenizer, TEXT_WIDTH, layers, TEXT_WIDTH)
    return CLIPTextModelWithProjection(CLIPTextConfig(**text))


def make_transformer(
    layers: int = 3,
    heads: int = TRANSFORMER_HEADS,
    states_width: int = 2 * TEXT_WIDTH,
    max_side: int = LATENT_SIDE // 2,
) -> SD3Transformer2DModel:
    """`max_side`: largest side of a picture, in patches."""
    return SD3Transformer2DModel(
        sample_size=LATENT_SIDE,
        patch_size=2,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=layers,
        attention_head_dim=HEAD_WIDTH,
        num_attention_heads=heads,
        caption_projection_dim=heads * HEAD_WIDTH,
        joint_attention_dim=states_width,
        pooled_projection_dim=2 * TEXT_WIDTH,
        pos_embed_max_size=max_side,
    )


def make_vae() -> AutoencoderKL:
    """8x down, 4 channels: a 64x64 picture becomes 8x8 latents."""
    return AutoencoderKL(
        sample_size=IMAGE_SIDE_PX,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8, 16, 32, 32),
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=4,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def make_clip(
    tokenizer: CLIPTokenizer, width: int = 64, projection: int = 32, side_px: int = IMAGE_SIDE_PX
) -> CLIPModel:
    vision = {
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": 2,
        "num_attention_heads": width // 16,
        "image_size": side_px,
        "patch_size": side_px // 4,
        "projection_dim": projection,
    }
    text = _text_config(tokenizer, width, 2, projection)
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=projection))


def random_picture(rng: random.Random, wish: Wish) -> np.ndarray:
    """[64, 64, 3] uint8: the wish on a random grey, slightly off the centre of its quarter."""
    offset_px = rng.randint(-JITTER_PX, JITTER_PX), rng.randint(-JITTER_PX, JITTER_PX)
    return draw_array(scene_of(wish, rng.randrange(len(BACKGROUNDS_RGB)), offset_px))


def token_ids(
    tokenizer: CLIPTokenizer, texts: Sequence[str], length: int = MAX_TEXT_TOKENS
) -> torch.Tensor:
    """[B, length], padded and truncated as the pipeline does it."""
    options = {"padding": "max_length", "max_length": length, "truncation": True}
    return tokenizer(list(texts), return_tensors="pt", **options).input_ids


def condition(encoders, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(states [B, L + T5_TOKENS, 2 TEXT_WIDTH], pooled [B, 2 TEXT_WIDTH]) as the pipeline makes
    them without a T5, whose states are zeros."""
    outputs = [encoder(ids, output_hidden_states=True) for encoder in encoders]
    states = torch.cat([output.hidden_states[-2] for output in outputs], -1)
    pooled = torch.cat([output.text_embeds for output in outputs], -1)
    return F.pad(states, (0, 0, 0, T5_TOKENS)), pooled
