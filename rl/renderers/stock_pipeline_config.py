"""The keys of `renderer: { type: 'diffusers' }`, and how each known pipeline is called."""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from rl.api.plugin import Count, FrozenModelConfig, SavesMemory
from rl.api.types import RenderJob
from rl.config.schema import MAX_SIDE_PX, Section

PATCH_PX = 16
"""Most transformers have one token per 16x16 px."""


class Record(Section):
    """How a pipeline is called. `RECORDS` has those that are known; of any other pipeline the keys
    begin with these defaults."""

    image: Annotated[str, Field(min_length=1)] | None = "image"
    """Keyword of the source pictures; null = it takes none, and draws from the words alone."""
    max_images: Annotated[int, Field(ge=1, le=16)] = 1
    """Limit of source pictures per sample, for which memory is planned. Above 1, a call gets them
    as a list; most editors read several that way, SD3 and Kontext do not."""
    together: Literal["one", "group", "all"] = "one"
    """What a call draws: one picture; several of one sample, as a list of prompts with one set of
    source pictures; or any, as a list of prompts with as many source pictures of one size."""
    sized: bool = True
    """Whether it takes `height` and `width`."""
    area: str | None = None
    """Keyword of the picture's area, px^2, of a pipeline that scales `height` and `width` to it."""
    prompt: str = "{words}"
    """What it gets as its prompt: `{words}` are the policy's words, `{json}` the same words as a
    JSON string."""
    tokenizer: str = "tokenizer"
    """The pipeline's part that counts the prompt's tokens."""
    max_tokens: Count = 0
    """Limit of the prompt's tokens, behind which it is cut off, unless `arguments` has a
    `max_sequence_length`; 0 = unknown."""
    added_tokens: Count = 0
    """Tokens that the pipeline's own template adds to the prompt; they count for the limit."""
    arguments: dict[str, Any] = {}
    """Further keywords of each call."""

    @field_validator("prompt")
    @classmethod
    def _has_words(cls, prompt: str) -> str:
        if "{words}" not in prompt and "{json}" not in prompt:
            raise ValueError("without {words} or {json} the policy's words are not read; add one")
        return prompt


GENERATORS = (
    "Flux2Pipeline",
    "QwenImagePipeline",
    "SanaPipeline",
    "StableDiffusion3Pipeline",
    "ZImagePipeline",
)
RECORDS: Mapping[str, Record] = {
    **dict.fromkeys(GENERATORS, Record(image=None, together="all")),
    "BriaFiboEditPipeline": Record(
        together="group",
        prompt='{"edit_instruction": {json}}',
        max_tokens=3000,
        arguments={"_auto_resize": False},
    ),
    "Flux2KleinPipeline": Record(together="group", max_tokens=512, added_tokens=12),
    "FluxKontextPipeline": Record(
        together="all",
        area="max_area",
        tokenizer="tokenizer_2",
        max_tokens=512,
        added_tokens=1,
        arguments={"_auto_resize": False},
    ),
    "FluxPipeline": Record(
        image=None, together="all", tokenizer="tokenizer_2", max_tokens=512, added_tokens=1
    ),
    "JoyImageEditPipeline": Record(max_tokens=4096),
    "LongCatImageEditPipeline": Record(sized=False, max_tokens=512),
    "QwenImageEditPipeline": Record(),
    "QwenImageEditPlusPipeline": Record(),
    "StableDiffusion3Img2ImgPipeline": Record(
        together="all", tokenizer="tokenizer_3", max_tokens=256, added_tokens=1
    ),
}
"""Class in diffusers -> how it is called. The editors among them were compared with the stock call
at tiny size."""


class Config(FrozenModelConfig):
    """`renderer: { type: 'diffusers', ... }`. The defaults are FLUX.2 klein's."""

    model_path: str = "black-forest-labs/FLUX.2-klein-4B"
    """Hub id, or a local folder as the pipeline saves it (safetensors)."""
    pipeline: str = "Flux2KleinPipeline"
    """Class of the pipeline: its name in diffusers, or the dotted path of your own class."""
    num_steps: Annotated[int, Field(ge=1, le=10_000)] | None = None
    """Denoising steps; null = the pipeline's default."""
    height_px: Annotated[int, Field(ge=PATCH_PX, le=MAX_SIDE_PX)] | None = None
    """Picture height, px, multiple of 16; null = the pipeline's choice, for an editor usually the
    source picture's."""
    width_px: Annotated[int, Field(ge=PATCH_PX, le=MAX_SIDE_PX)] | None = None
    """Picture width, px, as height_px."""
    arguments: dict[str, Any] = {}
    """Further keywords of each call (guidance_scale, negative_prompt, strength, ...), as the
    pipeline's documentation describes them."""
    record: Record = Record()
    """How the pipeline is called, where that is not known or should differ."""
    residency: Annotated[Literal["device", "host"], SavesMemory("host")] = "device"
    """host: the weights are on the GPU only while they are needed, one part of the pipeline at a
    time (diffusers' `enable_model_cpu_offload`); each call then moves all of them."""

    @property
    def call(self) -> Record:
        """The pipeline's record, with the keys that `record` sets."""
        known = RECORDS.get(self.pipeline.removeprefix("diffusers."), Record())
        return Record(
            **known.model_dump(exclude_unset=True) | self.record.model_dump(exclude_unset=True)
        )

    def prompt_of(self, words: str) -> str:
        """What the pipeline gets as its prompt."""
        forms = {"{words}": words, "{json}": json.dumps(words, ensure_ascii=False)}
        return re.sub("{words}|{json}", lambda found: forms[found[0]], self.call.prompt)


def batch_of(config: Config, job: RenderJob) -> tuple[Hashable, int]:
    """As `Renderer.batch_of`."""
    call = config.call
    sources = job.sample.sources if call.image else ()
    pixels = [hash(source.tobytes()) for source in sources if call.together == "group"]
    key = *(source.size for source in sources), *pixels
    return key, 1 if call.together == "one" else config.batch_size
