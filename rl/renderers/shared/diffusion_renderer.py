"""Base class of the renderer plugins for diffusers pipelines."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import TypeVar

from rl.api.plugin import DIFFUSERS_SAFETENSORS, FrozenModelConfig, ModelFiles, Resources
from rl.api.renderer import Renderer
from rl.api.types import RenderJob
from rl.config.schema import RunConfig
from rl.files import row_of
from rl.model_files import num_parameters
from rl.ranks.dist import resolve_device

if TYPE_CHECKING:
    from rl.renderers.shared.batches import Outcome
    from rl.renderers.shared.diffusion_loop import DiffusionLoop

ConfigT = TypeVar("ConfigT", bound=FrozenModelConfig, default=FrozenModelConfig)


class DiffusionRenderer(Renderer[ConfigT]):
    """A subclass names the pipeline's parts and loads the render loop."""

    side_multiple_px: ClassVar[int]
    """Sides of a fixed picture size are multiples of this."""
    hub_parameters: ClassVar[Mapping[str, Mapping[str, float]]]
    """Hub id -> part -> parameters on the device."""

    def __init__(self, config: ConfigT, resources: Resources) -> None:
        super().__init__(config, resources)
        self.loop = self.load(config, resolve_device(config.device, resources.device))
        self.state_dim = self.loop.state_dim
        self.loop.may_split = resources.may_split

    @classmethod
    @abstractmethod
    def load(cls, config: ConfigT, device: str) -> DiffusionLoop[Any, Any]:
        """The loop, with its models on the device."""

    @classmethod
    @abstractmethod
    def bucket_of(cls, config: ConfigT, job: RenderJob) -> Hashable:
        """The settings that jobs must share to be drawn in one batch: the render loop's."""

    @classmethod
    def batch_of(cls, config: ConfigT, job: RenderJob) -> tuple[Hashable, int]:
        return cls.bucket_of(config, job), config.batch_size

    def render(self, jobs: Iterable[RenderJob]) -> Iterator[tuple[int, Outcome]]:
        return self.loop.render(jobs)

    def take_metrics(self) -> dict[str, float]:
        return self.loop.take_metrics()

    @classmethod
    def problems(cls, config: ConfigT, run: RunConfig) -> list[str]:
        sides = {key: getattr(config, key) for key in ("height_px", "width_px")}
        unit = cls.side_multiple_px
        return [
            f"{key}: {side} is not a multiple of {unit}; try {round(side / unit) * unit}"
            for key, side in sides.items()
            if side is not None and side % unit
        ]

    @classmethod
    def part(cls, section: ConfigT, subfolder: str, *kinds: str, **more: Any) -> ModelFiles:
        """One part of the pipeline; by default a model that diffusers has saved."""
        origin = {"subfolder": subfolder, "revision": section.revision}
        options: dict[str, Any] = {"weights": DIFFUSERS_SAFETENSORS, **origin, **more}
        return ModelFiles("model_path", section.model_path, frozenset(kinds), **options)

    @classmethod
    def part_names(cls, config: ConfigT) -> Sequence[str]:
        """Subfolders of the models that are on the device."""
        return ("transformer", "vae")

    @classmethod
    def is_on_device(cls, parameter: str) -> bool:
        """Whether the parameter of this name is moved to the device."""
        return True

    @classmethod
    def parameter_counts(cls, config: ConfigT) -> dict[str, float]:
        """Parameters per part on the device, for a memory plan.

        From `hub_parameters`, or from a local folder's safetensors headers; {} for other hub ids.
        """
        folder, parts = Path(config.model_path), cls.part_names(config)
        if folder.is_dir():
            return {part: num_parameters(folder / part, cls.is_on_device) for part in parts}
        counts = cls.hub_parameters.get(config.model_path)
        return {part: counts[part] for part in parts} if counts else {}


def shape_of(config: FrozenModelConfig, hub_shape: Mapping[str, int]) -> tuple[int, int]:
    """(layers, width) of the transformer: of a local folder, else of the released model."""
    layers, heads, head_dim = (transformer_value(config, k) or v for k, v in hub_shape.items())
    return layers, heads * head_dim


def transformer_value(config: FrozenModelConfig, name: str) -> int | None:
    """An integer from a local folder's transformer config; None if there is no such integer."""
    file = Path(config.model_path, "transformer", "config.json")
    if not file.is_file():
        return None
    value = (row_of(file.read_bytes()) or {}).get(name)
    return value if isinstance(value, int) else None
