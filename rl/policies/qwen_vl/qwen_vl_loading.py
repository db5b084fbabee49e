"""Weights, tokenizer and image processor of a Qwen-VL, from folders or hub ids."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rl.console.progress import weights_counted
from rl.files.adapter_base import Base
from rl.policies.shared import model_loading

if TYPE_CHECKING:
    from rl.policies.qwen_vl.qwen_vl_config import Config


def load_tokenizer(config: Config) -> Any:
    """The policy's tokenizer. Raises OSError (transformers) naming what is missing."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        config.model_path, revision=config.revision, trust_remote_code=False
    )


def load_image_processor(config: Config) -> Any:
    """The PIL image processor: no torchvision, and one set of pixels on every machine."""
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
    """Its family's `...ForConditionalGeneration` on the CPU, in the configured dtype, not yet
    adapted. The files say which; that it is the plug's is asked before (`models`)."""
    import torch
    from transformers import AutoModelForImageTextToText

    from rl.policies.shared.packed_attention import register

    source: dict[str, Any] = {"revision": config.revision}
    path = config.model_path
    if config.init_text_encoder_from:
        path = config.init_text_encoder_from
        source = {"subfolder": config.text_encoder_subfolder}
    with weights_counted():
        return AutoModelForImageTextToText.from_pretrained(  # nosec B615 # its `revision`
            path,
            dtype=getattr(torch, config.dtype),
            attn_implementation={"text_config": register(), "vision_config": "sdpa"},
            trust_remote_code=False,
            **source,
        )


def adapt(model: Any, config: Config, seed: int = 0) -> Any:
    """A frozen tower is left out, though some of its layers have the language model's names."""
    within = r".*language_model\..*" if config.freeze_vision_tower else ""
    adapted = model_loading.adapt(model, config.lora, config.adapter_path, within, seed)
    if config.lora is None:
        model.model.visual.requires_grad_(not config.freeze_vision_tower)
    return adapted
