"""Renderer plug: Emu3's picture tokenizer, which draws the codes that a policy writes.

What: config, checks and counts, without torch. What not: decoding (`codec.py`) and batching
(`loop.py`). There is no template: the policy writes pictures in its own words. Called by
`build.py` and the config check.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from rl.api.types import ActionKind, PromptTemplate
from rl.ranks.placement import PlacedSection, resolve_device
from rl.renderers.emu3_vq.checkpoint import count_parameters, path_problems, tokenizer_config

if TYPE_CHECKING:
    from rl.renderers.emu3_vq.loop import Emu3VqRenderer

ACCEPTS: ActionKind = "image_tokens"
MAKES_IMAGES = True


class Config(PlacedSection):
    """`renderer: { type: 'emu3_vq', ... }`."""

    type: str
    """Name of the plug."""
    model_path: str = "BAAI/Emu3-VisionTokenizer"
    """Hub id or local folder (safetensors): BAAI's tokenizer, an `Emu3VQVAE`, or a whole Emu3 in
    transformers' form, of which the tokenizer alone is read."""
    revision: str | None = None
    """Hub branch, tag or commit; None = the newest. Ignored for a local folder."""
    dtype: Literal["bfloat16", "float16", "float32"] = "float32"
    """Of the decoder; weights stored otherwise are converted when loaded."""
    batch_size: Annotated[int, Field(ge=1)] = 16
    """Pictures of 256x256 px decoded together, of larger ones accordingly fewer; halved for a batch
    that does not fit in memory."""


def prompt_template(config: Config) -> PromptTemplate | None:
    """None: the policy's own prompt stands."""
    return None


def negative_prompt(config: Config) -> str | None:
    """None: nothing is guided."""
    return None


def validate(config: Config) -> list[str]:
    """What is wrong with the section, each with its key and remedy; [] when all is well."""
    return path_problems(config.model_path)


def parameter_counts(config: Config) -> dict[str, float]:
    """Parameters for a memory plan: {'vq': ...}; {} for an unknown hub id."""
    count = count_parameters(config.model_path)
    return {} if count is None else {"vq": count}


def activation_counts(config: Config) -> dict[str, float]:
    """Values alive at the peak of a decode: the block that narrows the full-size feature maps from
    twice the base channels to them holds about six of the wide ones."""
    file = Path(config.model_path) / "config.json"
    stated = tokenizer_config(json.loads(file.read_text())) if file.is_file() else {}
    return {"vq": 12.0 * stated.get("base_channels", 256) * config.batch_size * 256 * 256}


def build(config: Config, device: str) -> Emu3VqRenderer:
    """Load it onto `config.device`, or onto `device` (the rank's) when that is 'auto'."""
    from rl.renderers.emu3_vq.codec import load_codec
    from rl.renderers.emu3_vq.loop import Emu3VqRenderer

    place = resolve_device(config.device, device)
    codec = load_codec(config.model_path, config.revision, config.dtype, place)
    return Emu3VqRenderer(codec, config.batch_size)
