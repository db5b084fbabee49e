"""A tiny Emu3 picture tokenizer of the real class with random weights and distinct codes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import Emu3VQVAE, Emu3VQVAEConfig

NUM_CODES = 64

CONFIG: dict[str, Any] = {
    "codebook_size": NUM_CODES,
    "embed_dim": 4,
    "latent_channels": 4,
    "base_channels": 32,
    "channel_multiplier": [1, 1, 1, 2],
    "num_res_blocks": 1,
    "attn_resolutions": [3],
    "hidden_size": 64,
    "temporal_downsample_factor": 4,
}

ORIGINAL_CONFIG: dict[str, Any] = {
    "model_type": "Emu3VisionVQ",
    "architectures": ["Emu3VisionVQModel"],
    "auto_map": {"AutoModel": "modeling_emu3visionvq.Emu3VisionVQModel"},
    "codebook_size": NUM_CODES,
    "embed_dim": 4,
    "z_channels": 4,
    "double_z": False,
    "in_channels": 3,
    "out_channels": 3,
    "temporal_downsample_factor": 4,
    "ch": 32,
    "ch_mult": [1, 1, 1, 2],
    "num_res_blocks": 1,
    "attn_resolutions": [3],
    "dropout": 0.0,
}
"""The same tokenizer in the config format of the published class."""

ORIGINAL_PROCESSOR: dict[str, Any] = {
    "auto_map": {"AutoImageProcessor": "image_processing_emu3visionvq.Emu3VisionVQImageProcessor"},
    "image_processor_type": "Emu3VisionVQImageProcessor",
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "max_pixels": 1048576,
    "min_pixels": 262144,
    "resample": 3,
    "rescale_factor": 0.00392156862745098,
    "size": {"max_pixels": 1048576, "min_pixels": 262144},
    "spatial_factor": 8,
}


def make_vq() -> Emu3VQVAE:
    torch.manual_seed(0)
    vq = Emu3VQVAE(Emu3VQVAEConfig(**CONFIG)).eval()
    vq.decoder.conv_out.weight.data.mul_(0.05)  # the stock initialisation is far out of range
    for name, buffer in vq.named_buffers():  # random statistics, so that a test notices their loss
        if name.endswith("running_mean"):
            buffer.copy_(torch.randn_like(buffer) * 0.1)
        elif name.endswith("running_var"):
            buffer.copy_(1 + torch.rand_like(buffer))
    with torch.no_grad():  # a codebook of the encoder's latents of random pictures
        pixels = torch.rand(8, 1, 3, 64, 64).repeat(1, 4, 1, 1, 1) * 2 - 1
        latents = vq.quant_conv(vq.encoder(pixels).permute(0, 2, 1, 3, 4))
        latents = latents.permute(0, 2, 3, 4, 1).flatten(0, 3)
        vq.quantize.embedding.weight.copy_(latents[torch.randperm(len(latents))[:NUM_CODES]])
    return vq


def save_original(vq: Emu3VQVAE, folder: Path) -> None:
    """Writes BAAI's format: config keys, tensor names, 1x1 convolutions of the original class."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(ORIGINAL_CONFIG))
    (folder / "preprocessor_config.json").write_text(json.dumps(ORIGINAL_PROCESSOR))
    tensors = {}
    for name, tensor in vq.state_dict().items():
        old = name.replace("middle_block.attn_norm.", "mid.attn_1.norm.")
        old = re.sub(r"attn_norms\.(\d)\.", r"attn.\1.norm.", old)
        old = re.sub(r"\.([qkv])_proj\.", r".\1.", old).replace(".out_proj.", ".proj_out.")
        old = old.replace(".middle_block.", ".mid.").replace(".down_block.down.", ".down.")
        old = old.replace(".up_block.up.", ".up.")
        is_projection = re.search(r"\.(q|k|v|proj_out)\.weight$", old)
        tensors[old] = tensor[:, :, None, None].clone() if is_projection else tensor.clone()
    save_file(tensors, folder / "model.safetensors")


def make_codes(seed: int, height: int = 4, width: int = 4) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(0, NUM_CODES, (height, width)).astype(np.int32)
