"""The keys of a `clip` reward."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rl.api.plug import Dtype, FrozenModelConfig
from rl.config.schema import MAX_COUNT


class Config(FrozenModelConfig):
    """Which CLIP, and where it runs."""

    model_path: str = "openai/clip-vit-base-patch32"
    """Hub id of a CLIP of transformers, or a local folder."""
    dtype: Dtype = "float32"
    """Of weights and activations; cosines are taken in float32."""
    batch_size: Annotated[int, Field(ge=1, le=MAX_COUNT)] = 16
    """Pictures scored at once, best as many as the renderer draws at once: a batch of fewer is
    filled up to it on a GPU, and costs as much; a CPU forwards each by itself."""
    scale: Annotated[float, Field(gt=0, le=1e6)] = 2.5
    """Cosine times this is the value."""
