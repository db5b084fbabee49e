"""The keys of `renderer: { type: 'diffusers' }`, and how each known pipeline is called."""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence, Set
from typing import Annotated, Any, Literal

from pydantic import Field

from rl.api.plugin import Count, FrozenModelConfig, SavesMemory
from rl.api.types import RenderJob
from rl.config.loading import is_dotted_path, nearest
from rl.config.schema import MAX_SIDE_PX, Section, Unread
from rl.renderers.diffusion_renderer import Side


class Interface(Section):
    """How a pipeline is called. `INTERFACES` has the known ones; any other pipeline starts from
    these defaults."""

    image: Annotated[str, Field(min_length=1)] | None = "image"
    """The call's argument for the source pictures; null = the pipeline gets the words alone."""
    max_images: Annotated[int, Field(ge=1, le=16)] = 1
    """Limit of source pictures per sample; memory is planned for as many. Above 1, a call gets them
    as a list, which needs `together` 'one' or 'group'. Most editors read such a list as several
    sources; SD3 and Kontext do not."""
    together: Literal["one", "group", "all"] = "one"
    """What one call may draw. one: one picture. group: several pictures of one sample (a list of
    prompts, one set of source pictures). all: pictures of several samples (a list of prompts, and
    as many source pictures, all of one size)."""
    sized: bool = True
    """Whether the call takes `height` and `width`."""
    min_side_px: Annotated[int, Field(ge=1, le=MAX_SIDE_PX)] = 1
    """Shortest side of a source picture that the pipeline takes, px; rows with a shorter one are
    bad (`data.on_bad_row`)."""
    max_aspect_ratio: Annotated[float, Field(ge=1, le=MAX_SIDE_PX)] = MAX_SIDE_PX
    """Largest ratio of the sides of a source picture that the pipeline takes; likewise."""
    area: Annotated[str, Field(min_length=1)] | None = None
    """The call's argument for the picture's area, px^2, if the pipeline scales `height` and `width`
    to an area; null = it has none."""
    prompt: Annotated[str, Field(pattern=r"\{(words|json)\}")] = "{words}"
    """The prompt: `{words}` stands for the policy's words, `{json}` for the same words as a JSON
    string."""
    tokenizer: str = "tokenizer"
    """The part of the pipeline with which the prompt's tokens are counted."""
    max_tokens: Count = 0
    """Tokens of the prompt that the pipeline reads, unless `arguments` has a `max_sequence_length`;
    0 = unknown: no cut is counted."""
    added_tokens: Count = 0
    """Tokens that the pipeline's own template adds to the prompt; they count towards the limit."""
    cuts: bool = True
    """Whether the pipeline cuts a longer prompt off. If not, it is the policy's failure."""
    arguments: dict[str, Any] = {}
    """Further arguments of each call."""


OWN_ARGUMENTS = (
    *("prompt", "generator", "latents", "height", "width", "num_inference_steps"),
    *("num_images_per_prompt", "output_type", "return_dict"),
)
"""Arguments of a call that the renderer sets itself; the config must not."""
GENERATORS = ("QwenImagePipeline", "SanaPipeline", "StableDiffusion3Pipeline", "ZImagePipeline")
INTERFACES: Mapping[str, Interface] = {
    **dict.fromkeys(GENERATORS, Interface(image=None, together="all")),
    "BriaFiboEditPipeline": Interface(
        together="group",
        prompt='{"edit_instruction": {json}}',
        max_tokens=3000,
        arguments={"_auto_resize": False},
    ),
    "Flux2KleinPipeline": Interface(
        together="group", max_tokens=512, added_tokens=12, min_side_px=64, max_aspect_ratio=8
    ),
    "Flux2Pipeline": Interface(image=None, together="all", min_side_px=64, max_aspect_ratio=8),
    "FluxKontextPipeline": Interface(
        together="all",
        area="max_area",
        tokenizer="tokenizer_2",
        max_tokens=512,
        added_tokens=1,
        min_side_px=16,
        arguments={"_auto_resize": False},
    ),
    "FluxPipeline": Interface(
        image=None, together="all", tokenizer="tokenizer_2", max_tokens=512, added_tokens=1
    ),
    "JoyImageEditPipeline": Interface(max_tokens=4096),
    "LongCatImageEditPipeline": Interface(sized=False, max_tokens=512, cuts=False),
    "QwenImageEditPipeline": Interface(),
    "QwenImageEditPlusPipeline": Interface(),
    "StableDiffusion3Img2ImgPipeline": Interface(
        together="all", tokenizer="tokenizer_3", max_tokens=256, added_tokens=1
    ),
}
"""Class in diffusers -> how it is called. Tests compare each editor with the stock call at tiny
size."""


class Config(FrozenModelConfig):
    """`renderer: { type: 'diffusers', ... }`. The defaults are FLUX.2 klein's."""

    model_path: str = "black-forest-labs/FLUX.2-klein-4B"
    """Hub id, or a local folder as `save_pretrained` writes it (safetensors)."""
    pipeline: Annotated[str, Field(min_length=1)] = "Flux2KleinPipeline"
    """Class of the pipeline: its name in diffusers, or the dotted path of your own class."""
    num_steps: Annotated[int, Field(ge=1, le=10_000)] | None = None
    """Denoising steps; null = the pipeline's default."""
    height_px: Side | None = None
    """Picture height, px, a multiple of 16; null = the pipeline chooses: an editor usually takes
    the source picture's."""
    width_px: Side | None = None
    """Picture width, px, as for height_px."""
    arguments: dict[str, Any] = {}
    """Further arguments of each call (guidance_scale, negative_prompt, strength, ...), as the
    pipeline's documentation describes them."""
    interface: Interface = Interface()
    """How the pipeline is called, for a pipeline that is not known; or keys that replace those of a
    known one."""
    residency: Annotated[
        Literal["device", "host"], SavesMemory("host"), Unread("device", "cpu")
    ] = "device"
    """Where the weights are. device: always on the GPU. host: in host memory; each call moves one
    part of the pipeline at a time to the GPU (diffusers' `enable_model_cpu_offload`)."""

    @property
    def stock_name(self) -> str:
        """Name of the pipeline's class in diffusers; '' for a class of the user's own."""
        is_stock = self.pipeline.startswith("diffusers.") or not is_dotted_path(self.pipeline)
        return self.pipeline.rpartition(".")[2] if is_stock else ""

    @property
    def call(self) -> Interface:
        """The pipeline's interface, with the keys that `interface` sets."""
        known = INTERFACES.get(self.stock_name, Interface())
        own = self.interface.model_dump(exclude_unset=True)
        return Interface(**known.model_dump(exclude_unset=True) | own)

    def prompt_of(self, words: str) -> str:
        """The prompt of a call for these words."""
        forms = {"{words}": words, "{json}": json.dumps(words, ensure_ascii=False)}
        return re.sub("{words}|{json}", lambda found: forms[found[0]], self.call.prompt)


def call_problems(config: Config, taken: Set[str] | None) -> Iterator[str]:
    """What the pipeline's call cannot be given, as 'key: what, remedy'. `taken`: names of its
    arguments; None: unknown, or any."""
    call, name = config.call, config.pipeline
    interface = set(filter(None, (call.image, call.area)))
    arguments = {*call.arguments, *config.arguments}
    taken = {"prompt", "height", *interface, *arguments} if taken is None else taken
    if "prompt" not in taken:
        yield f"pipeline: {name} takes no prompt; name one that draws from words"
    if config.height_px and not (call.sized and "height" in taken):
        yield f"height_px: {name} takes no size; drop both sides"
    free = taken - {*OWN_ARGUMENTS, "self"}
    for key, given in (("interface", interface), ("arguments", arguments)):
        for wrong in sorted(given - free):
            hint = nearest(wrong, sorted(free))
            yield f"{key}: {wrong!r} is no argument of {name}, or the renderer sets it; {hint}"
        free -= given


def sources_problem(config: Config, sizes: Sequence[tuple[int, int] | None]) -> str:
    """Why the pipeline cannot draw from source pictures of these sizes ((width, height), px; None:
    unknown); '' if it can."""
    call = config.call
    if call.image is None:
        return ""
    if len(sizes) > call.max_images:
        return (
            f"has {len(sizes)} source pictures, and renderer.interface.max_images is "
            f"{call.max_images}; raise it if {config.pipeline} reads several, or give fewer"
        )
    for size in filter(None, sizes):
        if min(size) < call.min_side_px or max(size) > call.max_aspect_ratio * min(size):
            return (
                f"has a source picture of {size} px; {config.pipeline} takes sides of at least "
                f"{call.min_side_px} px, up to {call.max_aspect_ratio:g} : 1; scale or crop it"
            )
    return ""


def batch_of(config: Config, job: RenderJob) -> tuple[Hashable, int]:
    """As `Renderer.batch_of`."""
    call = config.call
    sources = job.sample.sources if call.image else ()
    pixels = [hash(source.tobytes()) for source in sources if call.together == "group"]
    key = *(source.size for source in sources), *pixels
    return key, 1 if call.together == "one" else config.batch_size
