"""The base class of plugins: it reads a config section as `Config`, and reports metrics."""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Generic, Literal, get_args, get_origin

from pydantic import Field
from typing_extensions import TypeVar

from rl.api.judge import Judge
from rl.api.metric import Metric
from rl.config.loading import is_folder
from rl.config.schema import AtLeast1, MetricName, RunConfig, Section, Unread

Dtype = Literal["float32", "bfloat16", "float16"]
Count = Annotated[int, Field(ge=0)]


class PluginConfig(Section):
    """Base class of a plugin's config section; its only key is `type`."""

    type: str = ""
    """The plugin's name, or its dotted path."""


class PlacedConfig(PluginConfig):
    """Base of the keys of a plugin that keeps a model on a device."""

    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda:\+?\d+)$")] = "auto"
    """'auto' = the rank's own device; else 'cpu', 'cuda:1', 'cuda:+1' (the rank's index plus 1)."""
    max_memory_gb: Annotated[
        Annotated[float, Field(gt=0, le=1e6)] | None, Unread("device", "cpu")
    ] = None
    """Limit of this model's GPU memory, GB (1e9 bytes; the policy's includes its inference engine);
    null = no limit. A batch that needs more is halved, as when the GPU is full."""
    dtype: Dtype = "bfloat16"
    """Data type of the model; weights stored in another one are converted when loaded."""


@dataclass(frozen=True)
class SavesMemory:
    """Beside a field of a frozen model's section: a value that takes less memory, which `rl check`
    suggests to a run that does not fit."""

    value: Any
    exact: bool = True
    """Whether the results stay the same, only slower."""


class FrozenModelConfig(PlacedConfig):
    """Base of the keys of a plugin that runs a frozen model in batches."""

    model_path: str
    """Hub id or local folder (safetensors)."""
    revision: Annotated[str | None, Unread("model_path", is_folder)] = None
    """Hub branch, tag or commit; null = the newest. Ignored for a local folder."""
    batch_size: Annotated[AtLeast1, SavesMemory(1)] = 8
    """Pictures per batch; halved permanently when a batch does not fit in memory."""


class FileConfig(PluginConfig):
    """Base of the keys of a plugin that reads a file or a data set."""

    path: str
    """File or folder."""


ConfigT = TypeVar("ConfigT", bound=Section, default=PluginConfig)


class PluginBase(ABC, Generic[ConfigT]):
    """`class Mine(Reward[MyConfig])` reads its section as a `MyConfig`; a bare `Reward` has no
    keys. Class methods are called before any model is loaded, and must not load one."""

    Config: ClassVar[type[Section]] = PluginConfig
    """The pydantic model of its config section: the class in the brackets, `MyConfig`."""
    metrics: ClassVar[Mapping[MetricName, Metric]] = {}
    """What `take_metrics` may report, by name. Logged as `reward/metric/<reward>/<name>`,
    `data/metric/train.<i>/<name>`, `policy/metric/<name>`, `engine/<name>`, `renderer/<name>`."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "Config" in cls.__dict__:
            return
        for base in cls.__dict__.get("__orig_bases__", ()):
            origin, arguments = get_origin(base), get_args(base)
            is_ours = isinstance(origin, type) and issubclass(origin, PluginBase)
            if is_ours and not isinstance(arguments[0], TypeVar):
                cls.Config = arguments[0]

    def take_metrics(self) -> Mapping[str, float]:
        """Metric name, as declared in `metrics` -> its mean on this rank since the last call. Omit
        a name without a value. Report a single picture's value as a part of its `RewardOutput`.

        Called once an iteration, after its last reward (a renderer's: its last picture). Metrics
        of an evaluation are discarded. Under `max_staleness` 1 the means may include part of the
        next iteration. The log has the mean over the ranks that report a name.

        If this raises, or reports an undeclared name or a value that is not finite, that report is
        left out of the log, with one warning.
        """
        return {}

    def close(self) -> None:
        """Called when the run ends."""
        return None


def reported_by(plugin: PluginBase[Any]) -> Mapping[str, float] | Exception:
    """The metrics that a plugin reports, or the exception, so that its other work is not lost."""
    try:
        return plugin.take_metrics()
    except Exception as error:
        return error


SAFETENSORS = ("model.safetensors",)
"""Weights as transformers saves them."""
DIFFUSERS_SAFETENSORS = ("diffusion_pytorch_model.safetensors",)
"""Weights as diffusers saves them."""


@dataclass(frozen=True)
class ModelFiles:
    """One model that a plugin loads: what its folder has to hold."""

    key: str
    """The config key that names the folder: 'model_path'."""
    path: str
    """Folder or hub id."""
    kinds: Set[str] = frozenset()
    """Allowed values of `model_type` (transformers) or `_class_name` (diffusers) in its config
    file; empty: any."""
    classes: Set[str] = frozenset()
    """Allowed values of `architectures`, where the config file has that key; empty: any."""
    subfolder: str = ""
    revision: str | None = None
    """Hub branch, tag or commit; None = the newest."""
    config: str = "config.json"
    config_required: bool = True
    weights: Sequence[str] = SAFETENSORS
    """One of these, or its index (`model.safetensors.index.json`) with all its files; () = none."""
    files: Sequence[Sequence[str]] = ()
    """Further files: at least one of each inner sequence must exist."""


class RunPlugin(PluginBase[ConfigT]):
    """Base of plugins whose keys may conflict with the rest of the config: all but data sources."""

    @classmethod
    def models(cls, config: ConfigT) -> Sequence[ModelFiles]:
        """The models that it loads; the first known one gives a policy's shape. A run does not
        start if a folder is missing, holds another model or lacks files; of a hub id, only the
        files in the local cache are checked."""
        return []

    @classmethod
    def problems(cls, config: ConfigT, run: RunConfig) -> Iterable[str]:
        """Conflicts between its keys, or with the rest of the config, each as 'key: what, remedy',
        with the key relative to the section. Single keys are checked by `Config` itself."""
        return []

    @classmethod
    def device_problems(
        cls, config: ConfigT, policy: PlacedConfig, capability: float | None
    ) -> Iterable[str]:
        """What it cannot compute on its device, in the form of `problems`. `policy`: the policy's
        section; `capability`: the GPU's (H100: 9.0; infinity: unknown), None for a CPU."""
        return []


@dataclass(frozen=True)
class ModelCost:
    """What a frozen model takes, for `rl check`'s plan of memory."""

    weights: Mapping[str, float] = field(default_factory=dict)
    """Part of the model -> number of weights on the device; {}: unknown, or no model."""
    activations: Mapping[str, float] = field(default_factory=dict)
    """Part of the model -> number of values alive at the peak of a forward."""
    host_weights: float = 0.0
    """Number of weights that stay in host memory instead."""
    host_shared: bool = True
    """Whether the ranks of a machine share those as pages of one file."""
    largest_part: float = 0.0
    """Number of weights of the largest part among `host_weights`, if these are moved to the device
    part by part while pictures are drawn."""


class ModelRunner(RunPlugin[ConfigT]):
    """A plugin that may run a frozen model of its own; its `Config` then derives from
    `PlacedConfig`."""

    runs_model: ClassVar[bool] = False
    """Whether creating the plugin loads a model or calls another service; if not (and it asks no
    judge), a reward is tried on made-up inputs before a run starts."""

    @classmethod
    def cost(cls, config: ConfigT) -> ModelCost:
        """What its model takes with this section."""
        return ModelCost()


@dataclass(frozen=True)
class Resources:
    """What a run passes to the constructor of a reward or a renderer."""

    judge: Judge | None
    """None for renderers, and where no reward of the run `needs_judge`."""
    device: str
    """The rank's device, 'cpu' or 'cuda:<index>'."""
    may_split: bool = True
    """False in a worker of a render pool: a renderer does not halve a batch that does not fit in
    memory, but fails it with a reason that starts with 'out_of_memory'."""
    is_first: bool = False
    """Whether this is a run's first rank, which does what one rank can do for all."""


def brief(value: object) -> str:
    """A value and its type as one short line."""
    text = " ".join(repr(value).split())
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
