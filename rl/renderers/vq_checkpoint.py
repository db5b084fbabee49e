"""Finds Emu3's picture tokenizer in a checkpoint, and maps its tensor names to transformers'."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl.model_files import num_parameters

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
ORIGINAL, STANDALONE, WHOLE = "Emu3VisionVQ", "emu3_vqgan", "emu3"
"""`model_type` of the supported checkpoints: `BAAI/Emu3-VisionTokenizer`, transformers'
`Emu3VQVAE.save_pretrained`, and a whole Emu3 (`BAAI/Emu3-Gen-hf`), which holds the tokenizer under
`model.vqmodel.`. Code in a checkpoint is never run."""

HUB_PARAMETERS: Mapping[str, float] = dict.fromkeys(
    (
        "BAAI/Emu3-VisionTokenizer",
        "BAAI/Emu3-Gen-hf",
        "BAAI/Emu3-Chat-hf",
        "Emu3-community/Emu3-Gen-hf",
        "Emu3-community/Emu3-Chat-hf",
    ),
    270.74e6,
)
"""Parameters of the tokenizer alone: encoder 109.5 M, decoder 161.1 M, codebook 0.1 M."""

# Without these renamings, transformers only warns and leaves most weights random.
_ORIGINAL_CONFIG_KEYS = {
    "ch": "base_channels",
    "ch_mult": "channel_multiplier",
    "z_channels": "latent_channels",
    "double_z": "double_latent",
}
_ORIGINAL_TENSOR_NAMES = (
    (r"\.mid\.attn_1\.norm\.", ".mid.attn_norm."),
    (r"\.attn\.(\d+)\.norm\.", r".attn_norms.\1."),
    (r"\.([qkv])\.(weight|bias)$", r".\1_proj.\2"),
    (r"\.proj_out\.", ".out_proj."),
    (r"\.mid\.", ".middle_block."),
    (r"\.down\.", ".down_block.down."),
    (r"\.up\.", ".up_block.up."),
)
_PARTS = ("encoder.", "decoder.", "quantize.", "quant_conv.", "post_quant_conv.")


def tokenizer_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """`Emu3VQVAEConfig` arguments from a `config.json`. Raises ValueError for other models.

    Keys missing from the config keep transformers' defaults, which are the published values.
    """
    kind = config.get("model_type")
    if kind == ORIGINAL:
        renamed = {_ORIGINAL_CONFIG_KEYS.get(key, key): value for key, value in config.items()}
        width, factors = renamed.get("base_channels", 256), renamed.get("channel_multiplier", [4])
        return renamed | {"model_type": STANDALONE, "hidden_size": width * factors[-1]}
    if kind == STANDALONE:
        return dict(config)
    if kind == WHOLE:
        return dict(config.get("vq_config") or {})
    raise ValueError(
        f"config.json is that of a {kind!r} model, which holds no Emu3 picture tokenizer; give "
        "BAAI/Emu3-VisionTokenizer, an Emu3VQVAE folder or a whole '-hf' Emu3"
    )


def tensor_name(name: str, original: bool) -> str | None:
    """The name in `Emu3VQVAE` of a checkpoint's tensor; None for a tensor outside the tokenizer."""
    name = re.sub(r"^(model\.)?vqmodel\.", "", name)
    if not name.startswith(_PARTS):
        return None
    for pattern, replacement in _ORIGINAL_TENSOR_NAMES if original else ():
        name = re.sub(pattern, replacement, name)
    return name


def count_parameters(model_path: str) -> float | None:
    """Parameters of the tokenizer: by a folder's safetensors headers, or by `HUB_PARAMETERS`."""
    folder = Path(model_path)
    if not folder.is_dir():
        return HUB_PARAMETERS.get(model_path)
    buffers = ("running_mean", "running_var", "num_batches_tracked")
    return num_parameters(
        folder, lambda name: bool(tensor_name(name, False)) and not name.endswith(buffers)
    )
