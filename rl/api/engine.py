"""The base class of inference engines: they hold a copy of the policy's weights.

Axes in names: `_P` prompts on this rank, `_G` completions in a group.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from rl.api.plug import ConfigT, Dtype, RunPlug
from rl.api.policy import Policy
from rl.api.types import Completion, PolicyWeights, Prompt, SamplingParams

Residency = Literal["auto", "resident", "sleep"]
"""Whether an engine keeps its memory while others use the device; auto: where the plan has room."""


@dataclass(frozen=True)
class EngineMemory:
    """What an engine's section says of the GPU memory it takes while awake."""

    share: float | None
    """Of the GPU's memory, for weights and key-value cache, 0..1; None: as `EngineSetup.claim`
    says, from the memory plan."""
    cache_mb: int | None = None
    """A key-value cache, MiB, that is stated instead of that share."""
    own_gb: float = 1.5
    """Graphs and buffers that it keeps even asleep, without its largest step, GB; assumed."""
    adapter_gb: float = 0.0
    """The same, besides, where the policy trains an adapter."""
    dtype: Dtype | None = None
    """Of its weights; None: the policy's."""
    max_model_len: int | None = None
    """Longest prompt + completion, tokens; None: what policy and sampling allow."""
    max_num_seqs: int = 1
    """Completions decoded at the same time."""
    residency: Residency = "resident"


@dataclass(frozen=True)
class EngineClaim:
    """The memory plan's share for an engine whose section states none; the same on every rank."""

    cache_bytes: int
    """Its key-value cache."""
    share: float
    """Of the device, 0..1: weights, workspace and that cache."""


@dataclass(frozen=True)
class EngineSetup:
    """What a run tells its engine when it is made."""

    policy: Policy[Any]
    device: str
    """The rank's own, 'cpu' or 'cuda:<index>'."""
    world_size: int = 1
    """Ranks of the run, each with an engine of its own, over one process group."""
    has_room: bool = True
    """Whether the device holds the engine beside all others."""
    claim: EngineClaim | None = None
    """None: its section says what it takes, or nobody knows the sizes."""
    sharded: bool = False
    """Whether the policy's weights will be (ZeRO-3): no rank can then run parts of it alone."""


class Engine(RunPlug[ConfigT]):
    """A plugin of `rl/engines`: samples completions."""

    samples_with_trainer: ClassVar[bool] = False
    """It reads the trainer's weights where they lie: refused where these are sharded."""

    def __init__(self, config: ConfigT, setup: EngineSetup) -> None:
        """Once per rank, on the policy's base weights, after the process group."""
        self.config = config

    @classmethod
    def memory(cls, config: ConfigT) -> EngineMemory | None:
        """For the memory plan; None where it takes none of its own, or nobody knows."""
        return None

    @abstractmethod
    def generate(
        self, prompts_P: Sequence[Prompt], params: SamplingParams, seeds_P: Sequence[int]
    ) -> list[list[Completion]]:
        """completions_PG; member g of prompt p is drawn from seed `seeds_P[p] + g`, whatever the
        batch order. The policy's `stop_token_ids` end a completion, `banned_token_ids` never come,
        and under an `image_vocabulary` pictures are held to `Prompt.grid`."""

    @abstractmethod
    def load_weights(self, weights: PolicyWeights) -> None:
        """Take what was trained, and forget everything computed from the weights before."""

    def sleep(self) -> None:
        """Give the device to the others, where the engine does not stay on it."""
        return None

    def wake(self) -> None:
        """Undo `sleep`; the weights are those from before it, RuntimeError where they are not."""
        return None

    def held_fingerprint(self) -> str | None:
        """The loaded weights' fingerprint if every tensor that the engine computes with, read back
        from its memory, is theirs (in its dtype), else in words which tensors differ.

        None if they cannot be read back, as here: the run warns, and stops only where the trainer's
        log-probs moved and the engine's did not at all. It cannot notice a partial sync then."""
        return None
