"""The base class of inference engines: they hold a copy of the policy's weights.

Axes in names: `_P` prompts on this rank, `_G` completions in a group.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from rl.api.plugin import ConfigT, Dtype, RunPlugin
from rl.api.policy import Policy
from rl.api.types import Completion, PolicyWeights, Prompt, SamplingParams

Residency = Literal["auto", "resident", "sleep"]
"""Whether an engine keeps its memory while others use the device; auto: if the plan has room."""


@dataclass(frozen=True)
class EngineMemory:
    """The GPU memory that an engine takes while awake, as its config section states it."""

    share: float | None
    """Share of the GPU's memory for weights and key-value cache, 0..1; None: the memory plan
    computes it (`EngineSetup.claim`)."""
    own_gb: float = 1.5
    """CUDA graphs and buffers kept even while asleep, GB (assumed), without its largest step's."""
    adapter_gb: float = 0.0
    """What it keeps in addition if the policy trains an adapter, GB."""
    dtype: Dtype | None = None
    """dtype of its weights; None: the policy's dtype."""
    max_model_len: int | None = None
    """Longest prompt + completion, tokens; None: what policy and sampling allow."""
    max_num_seqs: int = 1
    """Completions decoded at the same time."""
    residency: Residency = "resident"


@dataclass(frozen=True)
class EngineClaim:
    """What the memory plan gives an engine whose section states none; the same on every rank."""

    cache_bytes: int
    """Size of its key-value cache."""
    share: float
    """Share of the device's memory, 0..1, for weights, workspace and that cache."""


@dataclass(frozen=True)
class EngineSetup:
    """What a run passes to the constructor of its engine."""

    policy: Policy[Any]
    device: str
    """The rank's device, 'cpu' or 'cuda:<index>'."""
    world_size: int = 1
    """Number of ranks; each has its own engine, and all share one process group."""
    has_room: bool = True
    """Whether the engine fits on the device together with all other models."""
    claim: EngineClaim | None = None
    """Its memory by the plan; None: its section states the memory, or the sizes are unknown."""
    sharded: bool = False
    """Whether ZeRO-3 will shard the policy's weights: no rank can then run parts of it alone."""


class Engine(RunPlugin[ConfigT]):
    """A plugin of `rl/engines`: samples completions."""

    samples_with_trainer: ClassVar[bool] = False
    """Whether it samples from the trainer's own weights; refused where these are sharded."""

    def __init__(self, config: ConfigT, setup: EngineSetup) -> None:
        """Called once per rank, with the policy's base weights, after the process group exists."""
        self.config = config

    @classmethod
    def memory(cls, config: ConfigT) -> EngineMemory | None:
        """For the memory plan; None if it takes no memory of its own, or the amount is unknown."""
        return None

    @abstractmethod
    def generate(
        self, prompts_P: Sequence[Prompt], params: SamplingParams, seeds_P: Sequence[int]
    ) -> list[list[Completion]]:
        """completions_PG; completion g of prompt p is sampled with seed `seeds_P[p] + g`, whatever
        the batch order. The policy's `stop_token_ids` end a completion, no `banned_token_ids` are
        sampled, and with an `image_vocabulary` pictures must match `Prompt.grid`."""

    @abstractmethod
    def load_weights(self, weights: PolicyWeights) -> None:
        """Load the trained weights, and drop everything computed from the previous weights."""

    def sleep(self) -> None:
        """Free the device's memory for others, unless the engine stays resident."""
        return None

    def wake(self) -> None:
        """Undo `sleep`. Raises RuntimeError if the weights differ from those before `sleep`."""
        return None

    def held_fingerprint(self) -> str | None:
        """Read back every tensor that the engine computes with. Returns the loaded weights'
        fingerprint if all are equal (in its dtype), else a text that names those that differ.

        None, as here, if they cannot be read back: the run then warns, misses partial syncs, and
        stops only if the trainer's log-probs changed and none of the engine's did."""
        return None
