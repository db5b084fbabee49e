"""Weights, tokenizer and image processor of a Qwen2.5-VL, from folders or hub ids.

What: loading, LoRA wrapping, and the one folder an outside engine needs.
What not: prompts, the forward.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl.files.progress_bars import only_download_bars
from rl.policies.shared.loading import TEXT_FILES, link_files, local_folder
from rl.policies.shared.lora import add_adapter
from rl.ranks.wheels import mend_mismatched_wheels
from rl.record.adapter_base import Base

if TYPE_CHECKING:
    from rl.policies.qwen2_5_vl.config import Config

LANGUAGE_ONLY = r".*language_model\..*\.({names})"
"""The vision tower also has layers called gate_proj, up_proj and down_proj."""


def load_tokenizer(config: Config) -> Any:
    """The policy's tokenizer. Raises OSError (transformers) naming what is missing."""
    mend_mismatched_wheels()
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(config.model_path, revision=config.revision)


def load_image_processor(config: Config) -> Any:
    """The PIL image processor: no torchvision, and one set of pixels on every machine."""
    mend_mismatched_wheels()
    from transformers import Qwen2VLImageProcessorPil

    processor = Qwen2VLImageProcessorPil.from_pretrained(
        config.model_path, revision=config.revision
    )
    if config.image_min_pixels is not None:
        processor.size["shortest_edge"] = config.image_min_pixels
    if config.image_max_pixels is not None:
        processor.size["longest_edge"] = config.image_max_pixels
    return processor


def base(config: Config) -> Base:
    """The weights that training starts from."""
    editor = config.init_text_encoder_from
    if editor:
        return Base.of_editor(editor, config.text_encoder_subfolder, words=config.model_path)
    return Base(config.model_path, config.revision)


def load_model(config: Config) -> Any:
    """`Qwen2_5_VLForConditionalGeneration` on the CPU, in the configured dtype, not yet adapted."""
    mend_mismatched_wheels()
    import torch
    from transformers import Qwen2_5_VLForConditionalGeneration

    from rl.policies.shared.packed_attention import register

    source: dict[str, Any] = {"revision": config.revision}
    path = config.model_path
    if config.init_text_encoder_from:
        path = config.init_text_encoder_from
        source = {"subfolder": config.text_encoder_subfolder}
    with only_download_bars():
        return Qwen2_5_VLForConditionalGeneration.from_pretrained(
            path,
            dtype=getattr(torch, config.dtype),
            attn_implementation={"text_config": register(), "vision_config": "sdpa"},
            **source,
        )


def adapt(model: Any, config: Config) -> Any:
    """The model with a trainable LoRA, or itself with what is to be trained marked so.

    Raises ValueError when `adapter_path` holds another shape than `lora` asks for.
    """
    if config.lora is None:
        model.requires_grad_(True)
        model.model.visual.requires_grad_(not config.freeze_vision_tower)
        return model
    names = config.lora.target_modules
    language_only = LANGUAGE_ONLY.format(names="|".join(names))
    targets = language_only if config.freeze_vision_tower else names
    return add_adapter(model, config.lora, config.adapter_path, targets)


def engine_folder(config: Config, overlay: Path) -> str:
    """What an engine loads: the model path itself, or, when the weights come from an editor, a
    folder of links that joins those weights to the policy's tokenizer and processor files.

    `overlay` is filled only in the second case; the caller owns it.
    """
    if not config.init_text_encoder_from:
        pinned = config.revision is not None
        return (
            str(local_folder(config.model_path, config.revision)) if pinned else config.model_path
        )
    overlay.mkdir(parents=True, exist_ok=True)
    subfolder = config.text_encoder_subfolder
    weights = local_folder(config.init_text_encoder_from, None, [f"{subfolder}/*"]) / subfolder
    texts = local_folder(config.model_path, config.revision, TEXT_FILES)
    link_files(weights, overlay)
    link_files(texts, overlay, skip=("safetensors", ".bin"))
    return str(overlay)
