"""Stage export: round everything to fp16 and lay it out the way `from_pretrained` expects."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImageTransformer2DModel,
)
from transformers import AutoTokenizer, Qwen2VLImageProcessorPil

from tiny_world.builder.drift import load_policy
from tiny_world.builder.models import SCHEDULER
from tiny_world.builder.policy import save

WEIGHTS = Path(__file__).resolve().parents[1] / "weights"
LIMIT_BYTES = 10_000_000


def build(work: Path, target: Path = WEIGHTS) -> None:
    folders = (target / "policy", target / "editor")
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    save(load_policy(work / "policy").half(), target / "policy")
    AutoTokenizer.from_pretrained(work / "policy").save_pretrained(target / "policy")
    Qwen2VLImageProcessorPil.from_pretrained(work / "policy").save_pretrained(target / "policy")
    parts = {"vae": AutoencoderKLQwenImage, "transformer": QwenImageTransformer2DModel}
    for name, cls in parts.items():
        folder = target / "editor" / name
        cls.from_pretrained(work / name, torch_dtype=torch.float16).save_pretrained(folder)
        forget_origin(folder / "config.json")
    FlowMatchEulerDiscreteScheduler(**SCHEDULER).save_pretrained(target / "editor" / "scheduler")
    num_bytes = sum(f.stat().st_size for d in folders for f in d.rglob("*") if f.is_file())
    print(f"export: {num_bytes / 1e6:.2f} MB", flush=True)
    if num_bytes >= LIMIT_BYTES:
        raise ValueError(f"the weights are {num_bytes} bytes, the limit is {LIMIT_BYTES}")


def forget_origin(config: Path) -> None:
    """diffusers notes the folder a model was loaded from; that is nobody's business."""
    content = json.loads(config.read_text())
    content.pop("_name_or_path", None)
    config.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
