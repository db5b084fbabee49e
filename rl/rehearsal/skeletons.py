"""Folders with the config files of released models, so that they are built without their weights.

A local folder, or a hub id in the local cache, is used as it is. For the hub ids below the sizes
are written here, and tokenizers are those of the tiny world: text of a prompt then has other ids,
but the same number of tokens is written.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl.config.shipped import located
from rl.files.model_files import cached

NUM_TEXT_TOKENS = 151_851
"""Of Emu3's tokenizer, before its 32,768 visual tokens."""
NUM_CODES = 32_768
WEIGHTS = (".safetensors", ".bin", ".pt")

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Skeleton:
    """A released model: the tiny world's folder of the same layout, and what its configs hold."""

    tiny: str
    configs: Mapping[str, Json]
    """JSON file inside the model -> keys that differ from the tiny model's file."""
    more: Mapping[str, str] = field(default_factory=dict)
    """Further folder -> the tiny world's folder that it is copied from."""


def _qwen25(text: Json, vocab_size: int, tied: bool) -> Json:
    vision = {
        "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
        "fullatt_block_indexes": [7, 15, 23, 31], "out_hidden_size": text["hidden_size"],
        "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112,
    }  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    layers = text["num_hidden_layers"]
    more = {
        "rope_parameters": rope, "vocab_size": vocab_size, "max_position_embeddings": 128000,
        "layer_types": ["full_attention"] * layers, "max_window_layers": layers,
    }  # fmt: skip
    text = {**text, **more, "tie_word_embeddings": tied, "head_dim": 128}
    return {"text_config": text, "vision_config": vision, "tie_word_embeddings": tied}


def _qwen3(text: Json, vision: Json, tied: bool) -> Json:
    vision = {
        "num_heads": 16, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
        "out_hidden_size": text["hidden_size"], "num_position_embeddings": 2304, **vision,
    }  # fmt: skip
    rope = {
        "rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20],
        "mrope_interleaved": True,
    }  # fmt: skip
    more = {"rope_parameters": rope, "vocab_size": 151936, "max_position_embeddings": 262144}
    text = {**text, **more, "tie_word_embeddings": tied, "head_dim": 128}
    return {"text_config": text, "vision_config": vision, "tie_word_embeddings": tied}


def _sizes(width: int, mlp: int, layers: int, heads: int, kv_heads: int) -> Json:
    return {
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


_SMALL_TOWER = {
    "depth": 24, "hidden_size": 1024, "intermediate_size": 4096,
    "deepstack_visual_indexes": [5, 11, 17],
}  # fmt: skip
_LARGE_TOWER = {
    "depth": 27, "hidden_size": 1152, "intermediate_size": 4304,
    "deepstack_visual_indexes": [8, 16, 24],
}  # fmt: skip
_QWEN25_3B = _qwen25(_sizes(2048, 11008, 36, 16, 2), 151936, tied=True)
_QWEN25_7B = _qwen25(_sizes(3584, 18944, 28, 28, 4), 152064, tied=False)
_QWEN3_8B = _qwen3(_sizes(4096, 12288, 36, 32, 8), _LARGE_TOWER, tied=False)
_EMU3 = {
    **_sizes(4096, 14336, 32, 32, 8),
    "vocab_size": 184_622,
    "max_position_embeddings": 9216,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
_EMU3_VQ = {
    "attn_resolutions": [32], "base_channels": 256, "channel_multiplier": [1, 2, 2, 4],
    "codebook_size": NUM_CODES, "embed_dim": 4, "hidden_size": 1024, "latent_channels": 4,
    "num_res_blocks": 2, "temporal_downsample_factor": 4,
}  # fmt: skip
_READS_14 = {
    "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 3136,
    "max_pixels": 12845056, "size": {"shortest_edge": 3136, "longest_edge": 12845056},
}  # fmt: skip
_READS_16 = {
    "patch_size": 16, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 65536,
    "max_pixels": 16777216, "size": {"shortest_edge": 65536, "longest_edge": 16777216},
}  # fmt: skip
_CLIP_L = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
    "num_attention_heads": 12, "projection_dim": 768, "max_position_embeddings": 77,
    "vocab_size": 49408, "hidden_act": "quick_gelu",
}  # fmt: skip
_CLIP_G = {
    "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32,
    "num_attention_heads": 20, "projection_dim": 1280, "max_position_embeddings": 77,
    "vocab_size": 49408, "hidden_act": "gelu",
}  # fmt: skip
_T5_XXL = {
    "architectures": ["T5EncoderModel"], "model_type": "t5", "d_model": 4096, "d_ff": 10240,
    "d_kv": 64, "num_layers": 24, "num_heads": 64, "vocab_size": 32128,
    "feed_forward_proj": "gated-gelu", "is_encoder_decoder": True, "tie_word_embeddings": False,
}  # fmt: skip
_SD3_MEDIUM = {
    "_class_name": "SD3Transformer2DModel", "attention_head_dim": 64,
    "caption_projection_dim": 1536, "in_channels": 16, "joint_attention_dim": 4096,
    "num_attention_heads": 24, "num_layers": 24, "out_channels": 16, "patch_size": 2,
    "pooled_projection_dim": 2048, "pos_embed_max_size": 192, "sample_size": 128,
}  # fmt: skip
_SD3_VAE = {
    "_class_name": "AutoencoderKL", "act_fn": "silu", "block_out_channels": [128, 256, 512, 512],
    "down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4,
    "in_channels": 3, "out_channels": 3, "latent_channels": 16, "layers_per_block": 2,
    "norm_num_groups": 32, "sample_size": 1024, "scaling_factor": 1.5305, "shift_factor": 0.0609,
    "use_quant_conv": False, "use_post_quant_conv": False, "force_upcast": True,
}  # fmt: skip


def _policy25(config: Json) -> Skeleton:
    return Skeleton("policy", {"config.json": config, "preprocessor_config.json": _READS_14})


def _policy3(config: Json) -> Skeleton:
    files = {"config.json": config, "preprocessor_config.json": _READS_16}
    return Skeleton("image21/policy", files)


def _editor() -> Skeleton:
    """Qwen-Image-Edit: diffusers' defaults are the released sizes."""
    configs = {
        "transformer/config.json": {"_class_name": "QwenImageTransformer2DModel"},
        "vae/config.json": {"_class_name": "AutoencoderKLQwenImage"},
        "text_encoder/config.json": _QWEN25_7B,
    }
    return Skeleton("editor", configs, more={"text_encoder": "policy"})


KNOWN: Mapping[str, Skeleton] = {
    "Qwen/Qwen2.5-VL-3B-Instruct": _policy25(_QWEN25_3B),
    "Qwen/Qwen2.5-VL-7B-Instruct": _policy25(_QWEN25_7B),
    "Qwen/Qwen3-VL-2B-Instruct": _policy3(
        _qwen3(_sizes(2048, 6144, 28, 16, 8), _SMALL_TOWER, tied=True)
    ),
    "Qwen/Qwen3-VL-4B-Instruct": _policy3(
        _qwen3(_sizes(2560, 9728, 36, 32, 8), _SMALL_TOWER, tied=True)
    ),
    "Qwen/Qwen3-VL-8B-Instruct": _policy3(_QWEN3_8B),
    "Qwen/Qwen-Image-Edit": _editor(),
    "Qwen/Qwen-Image-Edit-2509": _editor(),
    "Qwen/Qwen-Image-Edit-2511": _editor(),
    "Qwen/Qwen-Image-2.1": Skeleton(
        "image21",
        {
            "transformer/config.json": {"_class_name": "QwenImage21Transformer2DModel"},
            "vae/config.json": {"_class_name": "AutoencoderKLQwenImage21"},
            "text_encoder/config.json": _QWEN3_8B,
        },
        more={"text_encoder": "image21/policy"},
    ),
    "stabilityai/stable-diffusion-3-medium-diffusers": Skeleton(
        "sd3",
        {
            "transformer/config.json": _SD3_MEDIUM,
            "vae/config.json": _SD3_VAE,
            "text_encoder/config.json": {**_CLIP_L, "model_type": "clip_text_model"},
            "text_encoder_2/config.json": {**_CLIP_G, "model_type": "clip_text_model"},
            "text_encoder_3/config.json": _T5_XXL,
        },
    ),
    **{
        name: Skeleton("emu3", {"config.json": _EMU3})
        for name in (
            "BAAI/Emu3-Gen",
            "BAAI/Emu3-Stage1",
            "mair-lab/sft-simple",
            "mair-lab/thinking-sft-simple",
            "Image-Editing/Emu3-Base-SFT-without_cot-May06_mixed_gc_lr1e-4-checkpoint-4800",
            "Image-Editing/Emu3-Base-SFT-without_cot-May07_mixed_gc_post_lr1e-4-checkpoint-1200",
        )
    },
    "BAAI/Emu3-VisionTokenizer": Skeleton("emu3_vq", {"config.json": _EMU3_VQ}),
}


def model_folder(path: str, revision: str | None, work: Path) -> str:
    """The folder, or cached hub id, with a model's config files and tokenizer. Raises ValueError
    for a hub id that is neither cached nor known."""
    if not path or Path(path).is_dir():
        return path
    if cached(path, "config.json", revision) or cached(path, "model_index.json", revision):
        return path
    if path not in KNOWN:
        raise ValueError(
            f"the sizes of {path!r} are not known: fetch its config files first (hf download "
            f"{path} --exclude '*.safetensors'), or name a folder that holds them"
        )
    target = work / path.replace("/", "--")
    if not target.is_dir():
        _write(KNOWN[path], target)
    return str(target)


def _write(skeleton: Skeleton, target: Path) -> None:
    _copy(skeleton.tiny, target)
    for folder, tiny in skeleton.more.items():
        _copy(tiny, target / folder)
    for name, sizes in skeleton.configs.items():
        file = target / name
        file.parent.mkdir(exist_ok=True)
        # A config that names its class is whole: its class's defaults fill the rest.
        is_whole = "_class_name" in sizes or "model_type" in sizes
        tiny = {} if is_whole else json.loads(file.read_text())
        file.write_text(json.dumps(_merged(tiny, sizes), indent=1))
    if skeleton.tiny == "sd3":
        _write_t5_tokenizer(target / "tokenizer_3")
    if skeleton.tiny == "emu3":
        _fill_emu3_tokenizer(target / "tokenizer.json")


def _copy(tiny: str, target: Path) -> None:
    """All files of one of the tiny world's models but its weights."""
    source = located(f"pkg://tiny_world/weights/{tiny}")
    skip = shutil.ignore_patterns(*(f"*{suffix}" for suffix in WEIGHTS))
    shutil.copytree(source, target, ignore=skip, dirs_exist_ok=True)


def _merged(old: Json, new: Json) -> dict[str, Any]:
    merged = dict(old)
    for key, value in new.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        is_nested = both and key.endswith("_config")
        merged[key] = _merged(merged[key], value) if is_nested else value
    return merged


def _fill_emu3_tokenizer(file: Path) -> None:
    """As many ids as the released tokenizer has: text tokens that no text contains, then the
    special tokens, then all visual tokens."""
    tokenizer = json.loads(file.read_text())
    vocab = tokenizer["model"]["vocab"]
    specials = [token for token in tokenizer["added_tokens"] if "visual" not in token["content"]]
    first_special = NUM_TEXT_TOKENS - len(specials)
    for number in range(len(vocab), first_special):
        vocab[f"<filler {number}>"] = number
    names = [token["content"] for token in specials]
    names += [f"<|visual token {code:06d}|>" for code in range(NUM_CODES)]
    tokenizer["added_tokens"] = [
        {**specials[0], "id": first_special + place, "content": name}
        for place, name in enumerate(names)
    ]
    file.write_text(json.dumps(tokenizer))


def _write_t5_tokenizer(folder: Path) -> None:
    """A word a token; prompts are padded to one length anyway."""
    from transformers import T5TokenizerFast

    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -1.0), ("a", -2.0)]
    T5TokenizerFast(vocab=pieces, extra_ids=0).save_pretrained(folder)
