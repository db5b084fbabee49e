"""The keys of the Qwen-VL policies; loads their weights, tokenizer and image processor."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rl.config.schema import MAX_COUNT
from rl.policies.shared.model_loading import load_tokenizer
from rl.policies.shared.policy_base import TrainedPolicyConfig
from rl.progress import weights_counted

__all__ = ["FILES", "Config", "load_image_processor", "load_model", "load_tokenizer"]
FILES = (("tokenizer.json", "vocab.json"), ("preprocessor_config.json", "processor_config.json"))
"""Files of which each model has one of each kind: of the tokenizer, of the image processor."""


class Config(TrainedPolicyConfig):
    """The policy section."""

    model_path: str
    """Folder or hub id: tokenizer, image processor and (usually) weights."""
    init_text_encoder_from: str = ""
    """Folder or hub id of an editor whose own text encoder gives the weights; '' = model_path's."""
    text_encoder_subfolder: str = "text_encoder"
    """The text encoder's subfolder in that editor."""
    freeze_vision_tower: bool = True
    """False: also train the vision tower (full), or adapt its layers of the same names (LoRA)."""
    system_prompt: str = "You are a helpful assistant."
    """For renderers that bring no template of their own; '' = no system turn."""
    conditioning: Literal["policy", "base"] = "policy"
    """Weights that make the renderer's hidden states: 'policy', the trained ones (the same forward
    gives the old log-probs), or 'base', the untrained ones (the renderer sees no drifted state)."""
    image_min_pixels: Annotated[int, Field(ge=1, le=MAX_COUNT)] | None = None
    """Smallest picture area the model sees, px; null = the processor's own."""
    image_max_pixels: Annotated[int, Field(ge=28 * 28, le=MAX_COUNT)] | None = None
    """Largest picture area the model sees, px; null = the processor's own."""
    max_kept_pictures: Annotated[int, Field(ge=1, le=MAX_COUNT)] = 64
    """Pictures whose features (while the vision tower is frozen) and negative embeddings are kept
    on the device. A picture of 1024 x 1024 px takes about 10 MB (34 MB in Qwen3-VL 8B). If a
    rank has more prompts than this in an iteration, their pictures are encoded again."""


def load_image_processor(config: Config) -> Any:
    """The PIL image processor: needs no torchvision, and gives equal pixels on all machines. Raises
    ValueError if the smallest picture is larger than the largest."""
    from transformers import Qwen2VLImageProcessorPil

    processor = Qwen2VLImageProcessorPil.from_pretrained(
        config.model_path, revision=config.revision
    )
    if config.image_min_pixels is not None:
        processor.size["shortest_edge"] = config.image_min_pixels
    if config.image_max_pixels is not None:
        processor.size["longest_edge"] = config.image_max_pixels
    least, most = processor.size["shortest_edge"], processor.size["longest_edge"]
    if least > most:
        raise ValueError(
            f"policy.image_min_pixels ({least}) is above policy.image_max_pixels ({most}), so that "
            "small pictures become larger than large ones; where a key is null, the number is that "
            f"of the image processor of {config.model_path}"
        )
    return processor


def load_model(config: Config) -> Any:
    """The `...ForConditionalGeneration` that its files name, on the CPU, in the configured dtype,
    without an adapter."""
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
