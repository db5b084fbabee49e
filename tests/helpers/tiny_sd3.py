"""A tiny Stable Diffusion 3 of the real classes; its random weights react to the conditioning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, StableDiffusion3Pipeline
from tiny_models import draw
from tokenizers import pre_tokenizers
from transformers import CLIPTokenizer, T5Config, T5EncoderModel, T5Tokenizer

from rl.api.types import RenderJob, Sample
from rl.renderers import sd3
from rl.renderers.sd3_loop import SD3Loop
from tiny_world.builder.prompt_models import make_text_encoder, make_transformer, make_vae

STATES_DIM = 96
TINY = {
    "type": "sd3",
    "model_path": "tiny/sd3",
    "dtype": "float32",
    "num_steps": 4,
    "height_px": 64,
    "width_px": 64,
    "max_t5_tokens": 32,
}
PROMPTS = ("a purple rabbit eating carrots", "a green cat", "a square wheel rolling downhill")


def clip_tokenizer() -> Any:
    """One token per byte (another at a word's end), CLIP's markers and its length of 77."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *(letter + "</w>" for letter in alphabet)]
    tokens += ["<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(
        vocab={token: i for i, token in enumerate(tokens)}, merges=[], model_max_length=77
    )


def t5_tokenizer() -> Any:
    """One token per letter."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    pieces += [(letter, -3.0) for letter in "abcdefghijklmnopqrstuvwxyz"]
    return T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=256)


def make_parts(scheduler_config: dict[str, Any] | None = None) -> StableDiffusion3Pipeline:
    torch.manual_seed(0)
    tokenizer, tokenizer_3 = clip_tokenizer(), t5_tokenizer()
    encoders = tuple(make_text_encoder(tokenizer, layers=3) for _ in range(2))
    t5 = T5Config(
        vocab_size=len(tokenizer_3), d_model=STATES_DIM, d_kv=16, d_ff=64, num_layers=2, num_heads=4
    )
    encoder_3 = T5EncoderModel(t5)
    transformer = make_transformer(2, heads=2, states_width=STATES_DIM, max_side=16)
    vae = make_vae()
    vae.register_to_config(shift_factor=0.0609, scaling_factor=1.5305)
    for module, std in ((transformer, 0.15), *((encoder, 0.3) for encoder in encoders)):
        draw(module, std)
    for module in (transformer, vae, encoder_3, *encoders):
        module.eval().requires_grad_(False)
    return StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(**(scheduler_config or {"shift": 3.0})),
        vae=vae,
        text_encoder=encoders[0],
        tokenizer=tokenizer,
        text_encoder_2=encoders[1],
        tokenizer_2=tokenizer,
        text_encoder_3=encoder_3,
        tokenizer_3=tokenizer_3,
    )


def stock_pipeline(parts: StableDiffusion3Pipeline, **changes: Any) -> StableDiffusion3Pipeline:
    """A copy with a scheduler of its own."""
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(parts.scheduler.config)
    pipeline = StableDiffusion3Pipeline(**{**parts.components, "scheduler": scheduler, **changes})
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def save_sd3(parts: StableDiffusion3Pipeline, folder: Path) -> None:
    """Writes the folder layout of the released checkpoints."""
    stock_pipeline(parts).save_pretrained(folder)


def make_renderer(parts: StableDiffusion3Pipeline, **changes: object) -> SD3Loop:
    return SD3Loop(sd3.Config(**{**TINY, **changes}), parts)


def make_job(prompt: str, noise_seed: int) -> RenderJob:
    return RenderJob(Sample(id=prompt[:40], instruction=prompt), prompt, noise_seed)


def make_jobs() -> list[RenderJob]:
    return [make_job(prompt, seed) for seed, prompt in enumerate(PROMPTS)]
