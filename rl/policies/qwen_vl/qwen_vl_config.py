"""The keys that the Qwen-VL policies share."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rl.config.schema import MAX_COUNT
from rl.policies.shared.policy_base import TrainedPolicyConfig


class Config(TrainedPolicyConfig):
    """The policy section."""

    model_path: str
    """Folder or hub id: tokenizer, image processor and (usually) weights."""
    init_text_encoder_from: str = ""
    """Folder or hub id of an editor whose own text encoder gives the weights; '' = model_path's."""
    text_encoder_subfolder: str = "text_encoder"
    """Where in that editor the text encoder lies."""
    freeze_vision_tower: bool = True
    """False also trains the tower (full) or adapts its equally named layers (LoRA)."""
    system_prompt: str = "You are a helpful assistant."
    """For renderers that bring no template of their own; '' = no system turn."""
    conditioning: Literal["policy", "base"] = "policy"
    """Whose hidden states the renderer gets: the trained weights' (their forward also gives the old
    log-probs) or the untrained base's (the renderer never sees drifted states)."""
    image_min_pixels: Annotated[int, Field(ge=1, le=MAX_COUNT)] | None = None
    """Smallest picture area the model sees, px; null = the processor's own."""
    image_max_pixels: Annotated[int, Field(ge=28 * 28, le=MAX_COUNT)] | None = None
    """Largest picture area the model sees, px; null = the processor's own."""
    max_kept_pictures: Annotated[int, Field(ge=1, le=MAX_COUNT)] = 64
    """Pictures whose features (while the vision tower is frozen) and negative embeddings are kept
    on the device, each about 10 MB at 1024 x 1024 px. Fewer than a rank has prompts in an
    iteration: they are encoded again."""
