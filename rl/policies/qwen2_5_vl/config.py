"""The keys of `policy: { type: 'qwen2_5_vl' }`. Read by all files of this folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from rl.config.schema import Section
from rl.policies.shared.lora import LoraSection

if TYPE_CHECKING:
    pass


class Config(Section):
    """The policy section."""

    type: str
    """'qwen2_5_vl'."""
    model_path: str
    """Folder or hub id: tokenizer, image processor and (usually) weights."""
    revision: str | None = None
    """Hub revision of model_path; null = newest."""
    init_text_encoder_from: str = ""
    """Folder or hub id of an editor whose own text encoder gives the weights; '' = model_path's."""
    text_encoder_subfolder: str = "text_encoder"
    """Where in that editor the text encoder lies."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Of the weights in memory; log-probs are float32 always."""
    device: str = "auto"
    """'auto' = this rank's device; else 'cpu', 'cuda:1', ..."""
    max_memory_gb: Annotated[float, Field(gt=0)] | None = None
    """Most GPU memory trainer and sampler may take together, GB (1e9 bytes); null = no limit."""
    lora: LoraSection | None = LoraSection()
    """null = full fine-tuning."""
    adapter_path: str = ""
    """PEFT adapter folder to start from ('' = a fresh one); must fit `lora`."""
    freeze_vision_tower: bool = True
    """False also trains the tower (full) or adapts its equally named layers (LoRA)."""
    system_prompt: str = "You are a helpful assistant."
    """For renderers that bring no template of their own; '' = no system turn."""
    conditioning: Literal["policy", "base"] = "policy"
    """Whose hidden states the renderer gets: the trained weights' (their forward also gives the old
    log-probs) or the untrained base's (the renderer never sees drifted states)."""
    attn_implementation: Literal["auto", "sdpa", "varlen"] = "auto"
    """Attention kernel of the trainer's packed rows: 'varlen' (flash attention, half precision on
    CUDA), 'sdpa' (everywhere), 'auto' = 'varlen' where it runs."""
    image_min_pixels: Annotated[int, Field(ge=1)] | None = None
    """Smallest picture area the model sees, px; null = the processor's own."""
    image_max_pixels: Annotated[int, Field(ge=28 * 28)] | None = None
    """Largest picture area the model sees, px; null = the processor's own."""
    max_prompt_tokens: Annotated[int, Field(ge=1)] = 2048
    """Longest prompt, image tokens included; a longer one stops the run, naming its sample."""
    max_kept_pictures: Annotated[int, Field(ge=1)] = 64
    """Pictures whose features (while the vision tower is frozen) and negative embeddings are kept
    on the device, each about 10 MB at 1024 x 1024 px. Fewer than a rank has prompts in an
    iteration: they are encoded again."""
