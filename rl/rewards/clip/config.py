"""The keys of a `clip` reward."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator

from rl.api.plug import Dtype, FrozenModelConfig
from rl.config.schema import missing_model


class Config(FrozenModelConfig):
    """Which CLIP, and where it runs."""

    model_path: str = "openai/clip-vit-base-patch32"
    """Hub id of a CLIP of transformers, or a local folder."""
    dtype: Dtype = "float32"
    """Of weights and activations; cosines are taken in float32."""
    batch_size: Annotated[int, Field(ge=1)] = 16
    """Pictures scored at once, best as many as the renderer draws at once: a batch of fewer is
    filled up to it on a GPU, and costs as much; a CPU forwards each by itself."""
    scale: Annotated[float, Field(gt=0)] = 2.5
    """Cosine times this is the value."""

    @field_validator("model_path")
    @classmethod
    def _can_be_found(cls, path: str) -> str:
        problems = missing_model("model_path", path)
        if problems:
            raise ValueError(problems[0].removeprefix("model_path: "))
        return path
