"""The keys of `renderer: { type: 'sd3' }`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rl.api.plugin import FrozenModelConfig, SavesMemory
from rl.config.schema import Unread
from rl.renderers.diffusion_renderer import Side


class Config(FrozenModelConfig):
    """A frozen Stable Diffusion 3. The defaults are the stock pipeline's."""

    model_path: str = "stabilityai/stable-diffusion-3-medium-diffusers"
    """Hub id (Stability's are gated: accept the licence on the hub, export HF_TOKEN), or a local
    folder as the pipeline saves it (safetensors)."""
    num_steps: Annotated[int, Field(ge=1, le=10_000)] = 28
    """Denoising steps, transformer forwards per picture (twice that with guidance)."""
    guidance_scale: Annotated[float, Field(ge=1, le=1000)] = 7.0
    """Classifier-free guidance scale; 1 = off, and then no negative prompt is ever encoded."""
    negative_prompt: Annotated[str, Unread("guidance_scale", 1)] = ""
    """What guidance steers away from; read only when guidance_scale > 1."""
    height_px: Side = 1024
    """Picture height, px, multiple of 16."""
    width_px: Side = 1024
    """Picture width, px, multiple of 16."""
    use_t5: Annotated[bool, SavesMemory(False, exact=False)] = True
    """False leaves the third text encoder out (4.8 B parameters, 9.5 GB in bfloat16): prompts are
    followed less closely, and CLIP's 77 tokens are then all that is read."""
    max_t5_tokens: Annotated[int, Field(ge=1, le=512)] = 256
    """Prompt tokens that T5 reads; shorter prompts are padded to this length. Without T5, as many
    zeros replace its output, as in the stock pipeline."""
