"""Stage prompt_export: prompt enhancement's weights in fp16, laid out for `from_pretrained`."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel
from transformers import (
    AutoTokenizer,
    CLIPImageProcessorPil,
    CLIPModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
)

from tiny_world.builder.drift import load_policy
from tiny_world.builder.export import WEIGHTS, forget_origin
from tiny_world.builder.policy import save
from tiny_world.builder.prompt_models import SCHEDULER, make_clip_tokenizer
from tiny_world.builder.tokenizer import save as save_tokenizer

LIMIT_BYTES = 4_000_000


def build(work: Path, target: Path = WEIGHTS) -> None:
    folders = [target / name for name in ("sd3", "clip", "rewriter")]
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    _export_sd3(work, target / "sd3")
    CLIPModel.from_pretrained(work / "clip").half().save_pretrained(target / "clip")
    CLIPTokenizer.from_pretrained(work / "clip").save_pretrained(target / "clip")
    CLIPImageProcessorPil.from_pretrained(work / "clip").save_pretrained(target / "clip")
    save(load_policy(work / "rewriter").half(), target / "rewriter")
    save_tokenizer(AutoTokenizer.from_pretrained(work / "rewriter"), target / "rewriter")
    num_bytes = sum(f.stat().st_size for d in folders for f in d.rglob("*") if f.is_file())
    print(f"prompt_export: {num_bytes / 1e6:.2f} MB", flush=True)
    if num_bytes >= LIMIT_BYTES:
        raise ValueError(f"the weights are {num_bytes} bytes, the limit is {LIMIT_BYTES}")


def _export_sd3(work: Path, target: Path) -> None:
    half = torch.float16
    vae = AutoencoderKL.from_pretrained(work / "sd3_vae", torch_dtype=half)
    transformer = SD3Transformer2DModel.from_pretrained(
        work / "sd3" / "transformer", torch_dtype=half
    )
    for name, part in (("vae", vae), ("transformer", transformer)):
        part.save_pretrained(target / name)
        forget_origin(target / name / "config.json")
    for name in ("text_encoder", "text_encoder_2"):
        encoder = CLIPTextModelWithProjection.from_pretrained(work / "sd3" / name)
        encoder.half().save_pretrained(target / name)
    for name in ("tokenizer", "tokenizer_2"):
        make_clip_tokenizer().save_pretrained(target / name)
    FlowMatchEulerDiscreteScheduler(**SCHEDULER).save_pretrained(target / "scheduler")
