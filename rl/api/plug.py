"""The base of every plugin: a section of the config as its `Config`, and metrics of its own."""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Literal, get_args, get_origin

from pydantic import Field
from typing_extensions import TypeVar

from rl.api.judge import Judge
from rl.api.metric import Metric, MetricName
from rl.config.schema import MAX_COUNT, RunConfig, Section, changed

Dtype = Literal["float32", "bfloat16", "float16"]
Count = Annotated[int, Field(ge=0)]


class PlugConfig(Section):
    """Base of a plugin's own keys; by itself: no keys."""

    type: str = ""
    """The plugin's name, or its dotted path."""


class PlacedConfig(PlugConfig):
    """Base of the keys of a plugin that keeps a model on a device."""

    device: str = "auto"
    """'auto' = the rank's own device; else 'cpu', 'cuda:1', 'cuda:+1' (the rank's number and 1)."""
    max_memory_gb: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Most GPU memory of this model, GB (1e9 bytes), the policy's with its inference engine; null =
    no limit. A batch that needs more is halved, as when the GPU is full."""
    dtype: Dtype = "bfloat16"
    """Of the model; weights stored otherwise are converted when loaded."""


class FrozenModelConfig(PlacedConfig):
    """Base of the keys of a plugin that runs a frozen model in batches."""

    model_path: str
    """Hub id or local folder (safetensors)."""
    revision: str | None = None
    """Hub branch, tag or commit; null = the newest. Ignored for a local folder."""
    batch_size: Annotated[int, Field(ge=1, le=MAX_COUNT)] = 8
    """Pictures computed together; halved from the first batch on that does not fit in memory."""


class FileConfig(PlugConfig):
    """Base of the keys of a plugin that reads a file or a data set."""

    path: str
    """File or folder."""


def unread(section: Section, keys: str | None, why: str, at: str = "") -> list[str]:
    """For `no_effect`: the `keys` (separated by spaces; None: all) that are not at their defaults.
    `at`: the section's place, 'lora.'."""
    names = None if keys is None else keys.split()
    return [f"{at}{key}: {why}" for key in changed(section, names)]


ConfigT = TypeVar("ConfigT", bound=Section, default=PlugConfig)


class PlugBase(ABC, Generic[ConfigT]):
    """`class Mine(Reward[MyConfig])` reads its section as a `MyConfig`; a bare `Reward` has no
    keys. Class methods answer before anything is loaded, and load nothing."""

    Config: ClassVar[type[Section]] = PlugConfig
    """The model of its section: the class in those brackets."""
    metrics: ClassVar[Mapping[MetricName, Metric]] = {}
    """What `take_metrics` may report, by name. Logged as `reward/metric/<reward>/<name>`,
    `data/metric/train.<i>/<name>`, `policy/metric/<name>`, `engine/<name>`, `renderer/<name>`."""

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if "Config" in cls.__dict__:
            return
        for base in cls.__dict__.get("__orig_bases__", ()):
            origin, given = get_origin(base), get_args(base)
            is_ours = isinstance(origin, type) and issubclass(origin, PlugBase)
            if is_ours and not isinstance(given[0], TypeVar):
                cls.Config = given[0]

    @classmethod
    def reads_from(cls, config: ConfigT) -> Sequence[str]:
        """Hub ids, folders and files that it reads; a policy's first known one tells its shape."""
        if isinstance(config, FrozenModelConfig):
            return [config.model_path]
        return [config.path] if isinstance(config, FileConfig) and config.path else []

    @classmethod
    def no_effect(cls, config: ConfigT) -> Iterable[str]:
        """'key: why' of each key that is set and that nothing reads beside the section's others. A
        key that contradicts others belongs in `problems`."""
        found = []
        if isinstance(config, PlacedConfig) and config.device == "cpu":
            found += unread(config, "max_memory_gb", "a CPU's memory is not limited")
        if isinstance(config, FrozenModelConfig) and Path(config.model_path).is_dir():
            found += unread(config, "revision", "model_path is a folder")
        return found

    def take_metrics(self) -> Mapping[str, float]:
        """Means since the last call over what this rank saw, by declared name; a name without a
        value is left out. What belongs to one picture is a part of its `RewardOutput` instead.

        Called once an iteration, after its last verdict (a renderer's: its last picture); what a
        held-out run left is taken and dropped. Under `max_staleness` 1 part of the next iteration
        may be in it. The log has the mean over the ranks that report a name.

        An exception, an undeclared name and a value that is not finite are left out with one
        warning.
        """
        return {}

    def close(self) -> None:
        """The run ends."""
        return None


def reported_by(plugin: PlugBase[Any]) -> Mapping[str, float] | Exception:
    """The metrics that a plugin reports, or what it raises: no reason to lose its work."""
    try:
        return plugin.take_metrics()
    except Exception as error:
        return error


SAFETENSORS = ("model.safetensors",)
"""Weights as transformers saves them."""
DIFFUSERS_SAFETENSORS = ("diffusion_pytorch_model.safetensors",)
"""As diffusers does."""


@dataclass(frozen=True)
class ModelFiles:
    """One model that a plugin loads: what its folder has to hold."""

    key: str
    """Of the section, where the folder is named: 'model_path'."""
    path: str
    """Folder or hub id."""
    kinds: Set[str] = frozenset()
    """What `model_type` (transformers) or `_class_name` (diffusers) of its config file may be;
    empty: whatever."""
    classes: Set[str] = frozenset()
    """What `architectures` may be, where it is stated; empty: whatever."""
    subfolder: str = ""
    revision: str | None = None
    """Of a hub id; None = the newest."""
    config: str = "config.json"
    config_required: bool = True
    weights: Sequence[str] = SAFETENSORS
    """One of these, or its index (`model.safetensors.index.json`) with all its files; () = none."""
    files: Sequence[Sequence[str]] = ()
    """Of each of these one more file must be there."""


class RunPlug(PlugBase[ConfigT]):
    """A plugin that the rest of the config may contradict: all but data sources."""

    @classmethod
    def models(cls, config: ConfigT) -> Sequence[ModelFiles]:
        """What it loads. A start refuses a folder that is missing, holds another model or lacks
        files; of a hub id it checks what is in the local cache."""
        return []

    @classmethod
    def problems(cls, config: ConfigT, run: RunConfig) -> Iterable[str]:
        """What is wrong between its keys, or between them and the rest of the config, as 'key:
        what, remedy', the key relative to the section. `Config` itself checks single keys."""
        return []

    @classmethod
    def device_problems(
        cls, config: ConfigT, policy: PlacedConfig, capability: float | None
    ) -> Iterable[str]:
        """What it cannot compute on its device, in the form of `problems`. `policy`: its section;
        `capability`: of the GPU (H100: 9.0; infinity: unknown); None: the device is a CPU."""
        return []


@dataclass(frozen=True)
class Saving:
    """A value of one of the plugin's keys that saves memory."""

    key: str
    value: Any
    exact: bool
    """Whether it computes the same, only slower."""


class ModelRunner(RunPlug[ConfigT]):
    """A plugin that may run a frozen model of its own; its `Config` then derives from
    `PlacedConfig`."""

    runs_model: ClassVar[bool] = False
    """Whether making one loads a model or asks another service; if not (and it asks no judge), it
    is tried on made-up inputs before a run starts."""

    @classmethod
    def parameter_counts(cls, config: ConfigT) -> Mapping[str, float]:
        """Weights on the device by part of the model, for the memory plan; {} where unknown."""
        return {}

    @classmethod
    def host_parameters(cls, config: ConfigT) -> float:
        """Weights that stay in host memory instead, likewise."""
        return 0.0

    @classmethod
    def shares_host_parameters(cls, config: ConfigT) -> bool:
        """Whether these are pages of their file, once for all ranks of a machine, not copies."""
        return True

    @classmethod
    def activation_counts(cls, config: ConfigT) -> Mapping[str, float]:
        """Values alive at the peak of a forward, by the same parts."""
        return {}

    @classmethod
    def savings(cls, config: ConfigT) -> Sequence[Saving]:
        """Its own keys that would make it smaller, the cheapest first, for `--check`'s advice."""
        batched = isinstance(config, FrozenModelConfig) and config.batch_size > 1
        return [Saving("batch_size", 1, exact=True)] if batched else []


@dataclass(frozen=True)
class Resources:
    """What a run lends a reward or a renderer."""

    judge: Judge | None
    """None for renderers, and where no reward of the run `needs_judge`."""
    device: str
    """The rank's own, 'cpu' or 'cuda:<index>'."""


def too_old(capability: float | None, least: float, what: str, remedy: str) -> list[str]:
    """For `device_problems`: where a GPU has less compute capability than `what` needs."""
    if capability is None or capability >= least:
        return []
    return [
        f"{what} needs a GPU of compute capability {least}, this one has {capability}; {remedy}"
    ]


def shown(value: object) -> str:
    """A value and its type on one line, short."""
    try:
        text = " ".join(repr(value).split())
    except Exception as error:  # an outsider's class
        text = f"what raises {type(error).__name__} when it is printed"
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
