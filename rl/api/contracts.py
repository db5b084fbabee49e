"""The verbs that policies, engines and renderers promise: one protocol per room.

What: `Policy`, `Engine`, `Renderer`. What not: the nouns they speak (`types.py`), what a plug FILE
of theirs exports (`build.ROOMS`), the rooms whose plugs are classes or functions (`reward.py`,
`data.py`, `loss.py`). Nothing heavy is imported here.

Axes in names: as in `types.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from rl.api.types import (
    Action,
    Completion,
    ImageVocabulary,
    PolicyWeights,
    Prompt,
    RenderFailure,
    RenderJob,
    Row,
    Sample,
    SamplingParams,
    TokenBatch,
    TokenOutputs,
)

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image


class Policy(Protocol):
    """A plug of `rl/policies`: a trainable model that reads prompts and writes completions."""

    module: torch.nn.Module
    """`module(batch: TokenBatch) -> TokenOutputs`; what the learner trains. Everything a forward
    needs happens inside this one call, so that sharded training (ZeRO-3) can wrap it."""
    banned_token_ids: tuple[int, ...]
    """Never sampled, and left out of the softmax in sampler and trainer alike."""
    stop_token_ids: tuple[int, ...]
    state_dim: int
    """Width of its hidden states."""
    image_vocabulary: ImageVocabulary | None
    """With which a sampler holds completions to `Prompt.grid`; None: it is never constrained."""

    def build_prompt(self, sample: Sample) -> Prompt: ...

    def encode_completion(self, text: str) -> Completion:
        """`text` as if the policy had written it and stopped (for reference descriptions)."""
        ...

    def pass_through_completion(self, sample: Sample) -> Completion | None:
        """What a policy that adds nothing hands on, the user's own words: the bare arm. None
        where there is no such thing."""
        ...

    def loss_mask(self, completion: Completion, iteration: int) -> Sequence[bool]:
        """[T] which tokens are trained in this iteration, as the policy's section asks; forced ones
        are left out besides."""
        ...

    reads_states: bool
    """Whether `decode_actions` needs what the module's forward gives."""

    def decode_actions(
        self, rows: Sequence[Row], batch: TokenBatch | None, outputs: TokenOutputs | None
    ) -> list[Action]:
        """Understand the rows of one micro-batch. `outputs`: of `module(batch)`, where `batch` is
        `collate(rows)`, if it `reads_states`; nothing of its graph is kept."""
        ...

    def collate(self, rows: Sequence[Row]) -> TokenBatch:
        """Neighbouring rows that share their `Prompt` object are a group, its prompt there once."""
        ...

    def export_weights(self, tensors: Mapping[str, torch.Tensor], version: int) -> PolicyWeights:
        """`tensors`: the trainable parameters, whole, keyed as in `module.named_parameters()`."""
        ...

    def save_pretrained(self, folder: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """PEFT adapter (LoRA) or transformers folder (full) from the same tensors."""
        ...


class Engine(Protocol):
    """A plug of `rl/engines`: a sampler that holds a copy of the policy's weights."""

    def generate(
        self, prompts_P: Sequence[Prompt], params: SamplingParams, seeds_P: Sequence[int]
    ) -> list[list[Completion]]:
        """completions_PG; member g of prompt p is drawn from seed `seeds_P[p] + g`, whatever the
        batch order."""
        ...

    def sleep(self) -> None:
        """Give the device to the others, where the engine does not stay on it."""
        ...

    def wake(self) -> None: ...

    def load_weights(self, weights: PolicyWeights) -> None:
        """Take what was trained, and forget everything computed from the weights before."""
        ...

    def held_fingerprint(self) -> str | None:
        """The loaded weights' fingerprint if the tensors the engine really holds are theirs, else
        in words what is wrong; None if they cannot be read back on this engine."""
        ...

    def close(self) -> None: ...


class Renderer(Protocol):
    """A plug of `rl/renderers`: a frozen generator. Its module states `ACCEPTS: ActionKind`,
    `MAKES_IMAGES: bool` and `prompt_template(config) -> PromptTemplate | None`."""

    state_dim: int | None
    """Width of the hidden states it reads; None when it reads none."""

    def decode_sources(self, samples: Sequence[Sample]) -> list[Sample]:
        """The samples, with the pictures that exist only as codes drawn for rewards and records."""
        ...

    def take_stats(self) -> dict[str, float]:
        """What there is to report since the last call, means over pictures; {} if nothing."""
        ...

    def render(
        self, jobs: Iterable[RenderJob]
    ) -> Iterator[tuple[int, Image | RenderFailure | None]]:
        """Yield `(number of the job, picture)` as each is ready: judging can start at once. Jobs
        are taken as they are needed, since taking one may mean conditioning its group first."""
        ...
