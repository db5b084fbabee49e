"""Finds Emu3's picture tokenizer in a checkpoint, and maps its tensor names to transformers'."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl.model_files import num_parameters

WEIGHTS = "model.safetensors"
ORIGINAL, STANDALONE = "Emu3VisionVQ", "emu3_vqgan"
"""`model_type` of the supported checkpoints: `BAAI/Emu3-VisionTokenizer`, and transformers'
`Emu3VQVAE.save_pretrained`. Code in a checkpoint is never run."""

HUB_PARAMETERS: Mapping[str, float] = {"BAAI/Emu3-VisionTokenizer": 270.74e6}
"""Encoder 109.5 M, decoder 161.1 M, codebook 0.1 M."""

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
    raise ValueError(
        f"config.json is that of a {kind!r} model, not Emu3's picture tokenizer; give "
        "BAAI/Emu3-VisionTokenizer or an Emu3VQVAE folder"
    )


def tensor_name(name: str, original: bool) -> str:
    """The name in `Emu3VQVAE` of a checkpoint's tensor."""
    for pattern, replacement in _ORIGINAL_TENSOR_NAMES if original else ():
        name = re.sub(pattern, replacement, name)
    return name


def count_parameters(model_path: str) -> float | None:
    """Parameters of the tokenizer: by a folder's safetensors headers, or by `HUB_PARAMETERS`."""
    folder = Path(model_path)
    if not folder.is_dir():
        return HUB_PARAMETERS.get(model_path)
    buffers = ("running_mean", "running_var", "num_batches_tracked")
    return num_parameters(folder, lambda name: not name.endswith(buffers))
