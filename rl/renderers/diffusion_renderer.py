"""The base class of the diffusion renderers' plugins, and their schedulers; needs no torch."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field
from typing_extensions import TypeVar

from rl.api.plugin import DIFFUSERS_SAFETENSORS, FrozenModelConfig, ModelFiles, Resources
from rl.api.renderer import Renderer
from rl.api.types import RenderJob
from rl.config.loading import is_folder
from rl.config.schema import MAX_SIDE_PX, RunConfig, Section
from rl.files import read_object
from rl.model_files import file_here, num_parameters
from rl.ranks.dist import resolve_device

if TYPE_CHECKING:
    import torch

    from rl.renderers.diffusion_loop import DiffusionLoop, Outcome

# ---- diffusion renderer --------------------------------------------------------------------------
# Base class of the renderer plugins for diffusers pipelines.

ConfigT = TypeVar("ConfigT", bound=FrozenModelConfig, default=FrozenModelConfig)
INDEX = "model_index.json"
PATCH_PX = 16
"""Most transformers have one token per 16x16 px."""
Side = Annotated[int, Field(ge=PATCH_PX, le=MAX_SIDE_PX, multiple_of=PATCH_PX)]
HubParameters = Mapping[str, Mapping[str, float]]
"""Hub id -> part -> parameters on the device."""
LoopAndLoader = tuple[Any, Callable[[Any, str], Any]]
"""(the class of a render loop, the function that loads its models to a device)."""


class DiffusionRenderer(Renderer[ConfigT]):
    """A subclass names the pipeline's parts and loads the render loop."""

    hub_parameters: ClassVar[HubParameters]

    def __init__(self, config: ConfigT, resources: Resources) -> None:
        super().__init__(config, resources)
        loop, load_parts = self.loop_and_loader()
        device = resolve_device(config.device, resources.device)
        self.loop: DiffusionLoop[Any, Any] = loop(config, load_parts(config, device))
        self.state_dim = self.loop.state_dim
        self.loop.may_split = resources.may_split

    @classmethod
    @abstractmethod
    def loop_and_loader(cls) -> LoopAndLoader:
        """They import torch."""

    @classmethod
    def batch_of(cls, config: ConfigT, job: RenderJob) -> tuple[Hashable, int]:
        return cls.loop_and_loader()[0].bucket_of(config, job), config.batch_size

    def render(self, jobs: Iterable[RenderJob]) -> Iterator[tuple[int, Outcome]]:
        return self.loop.render(jobs)

    def take_metrics(self) -> dict[str, float]:
        return self.loop.take_metrics()

    @classmethod
    def problems(cls, config: ConfigT, run: RunConfig) -> Iterator[str]:
        if [getattr(config, key) for key in ("height_px", "width_px")].count(None) == 1:
            yield "height_px, width_px: set both for a fixed size, or neither"

    @classmethod
    def part(cls, section: ConfigT, subfolder: str, *kinds: str, **more: Any) -> ModelFiles:
        """One part of the pipeline; by default a model that diffusers has saved."""
        origin = {"subfolder": subfolder, "revision": section.revision}
        options: dict[str, Any] = {"weights": DIFFUSERS_SAFETENSORS, **origin, **more}
        return ModelFiles("model_path", section.model_path, frozenset(kinds), **options)

    @classmethod
    def is_on_device(cls, parameter: str) -> bool:
        """Whether the parameter of this name is moved to the device."""
        return True

    @classmethod
    def part_sizes(cls, config: ConfigT) -> dict[str, float]:
        """Parameters per part on the device, from `hub_parameters` or from a local folder's
        safetensors headers; {} for other hub ids."""
        parts = [model.subfolder for model in cls.models(config) if model.weights]
        if is_folder(config.model_path):
            folder = Path(config.model_path)
            return {part: num_parameters(folder / part, cls.is_on_device) for part in parts}
        counts = cls.hub_parameters.get(config.model_path, {})
        return {part: counts[part] for part in counts if part in parts or not parts}


def shape_of(config: FrozenModelConfig, hub_shape: Mapping[str, int]) -> tuple[int, int]:
    """(layers, width) of the transformer: of a local folder, else of the released model."""
    layers, heads, head_dim = (transformer_value(config, k) or v for k, v in hub_shape.items())
    return layers, heads * head_dim


def transformer_value(config: FrozenModelConfig, name: str) -> int | None:
    """An integer from the transformer's config; None if it is not here, or states none."""
    value = file_of(config, "transformer/config.json").get(name)
    return value if isinstance(value, int) else None


def file_of(config: FrozenModelConfig, name: str) -> dict[str, Any]:
    """The JSON object in a file of the model's folder, or of the hub's cache; {} if there is none
    here."""
    file = file_here(config.model_path, name, config.revision)
    return (read_object(file) or {}) if file else {}


# ---- scheduling ----------------------------------------------------------------------------------
# Noise schedules of flow-matching checkpoints, and the loop over their steps.


KEPT: Any = None
"""Default of a key that keeps the checkpoint's value; null is not a value for it."""


class SchedulerOverrides(Section):
    """Keys of the checkpoint's scheduler config to replace; omitted keys keep their values.

    For Lightning adapters, set base_shift = max_shift = log 3 and shift_terminal = null.
    """

    base_shift: float = KEPT
    """Log shift for a picture of base_image_seq_len tokens (usually 256)."""
    max_shift: float = KEPT
    """Log shift for a picture of max_image_seq_len tokens (8192); between the two lengths, it is
    interpolated linearly in the number of tokens."""
    shift_terminal: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Stretch the schedule so that its last sigma before 0 has this value; null = no stretch."""


def override_scheduler(scheduler: Any, overrides: SchedulerOverrides) -> Any:
    """A copy of a diffusers scheduler with some keys of its config replaced."""
    return type(scheduler).from_config(scheduler.config, **overrides.model_dump(exclude_unset=True))


def prepared(scheduler: Any, num_tokens: int, device: Any, sigmas: Any) -> Any:
    """A copy of a diffusers scheduler with the noise levels `sigmas`, shifted for a picture of
    `num_tokens` (not counting its sources).

    The log shift is interpolated between the checkpoint's base_shift and max_shift (Esser et al.
    2024, section 5.3.2); the scheduler uses it only with `use_dynamic_shifting`.
    """
    scheduler, anchors = copy.deepcopy(scheduler), scheduler.config
    slope = (anchors.max_shift - anchors.base_shift) / (
        anchors.max_image_seq_len - anchors.base_image_seq_len
    )
    shift = float(num_tokens * slope + (anchors.base_shift - slope * anchors.base_image_seq_len))
    scheduler.set_timesteps(device=device, mu=shift, sigmas=sigmas)
    scheduler.set_begin_index(0)
    return scheduler


def denoise(
    latents: torch.Tensor, scheduler: Any, velocity: Callable[[int, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Turn noise into clean latents of the same shape.

    Args:
        scheduler: Returned by `prepared` for this call.
        velocity: (step index, latents) -> velocity, in the shape of the latents.
    """
    for step, timestep in enumerate(scheduler.timesteps):
        latents = scheduler.step(velocity(step, latents), timestep, latents, return_dict=False)[0]
    return latents
