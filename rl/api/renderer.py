"""The base class of renderers: frozen generators of pictures (docs/plugins.md has one)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

from rl.api.plug import ConfigT, Count, ModelRunner, Resources
from rl.api.types import (
    ActionKind,
    PromptTemplate,
    RenderFailure,
    RenderJob,
    Sample,
    StateKind,
)

if TYPE_CHECKING:
    from PIL.Image import Image


class Renderer(ModelRunner[ConfigT]):
    """A plugin of `rl/renderers`: draws what the policy hands on."""

    accepts: ClassVar[ActionKind]
    """What it takes: 'hidden_states', 'text' or 'image_tokens'."""
    state_kind: ClassVar[StateKind] = "post_norm"
    """Where those hidden states are taken from, where it takes such."""
    makes_images: ClassVar[bool] = True
    """False: rewards read the completion alone."""
    runs_model: ClassVar[bool] = True
    """False: making one loads nothing, so that it is tried on made-up jobs before a run starts."""
    needs_source: ClassVar[bool] = False
    """Whether it edits: a run whose data brings no source pictures is refused."""
    reads_transparency: ClassVar[bool] = False
    """Whether a sample's transparent sources stay so, RGBA; else they are laid on white."""

    state_dim: int | None = None
    """Width of the hidden states it reads; None when it reads none."""

    def __init__(self, config: ConfigT, resources: Resources) -> None:
        """Once per rank, before the first iteration. ValueError says what the user can mend."""
        self.config = config

    @classmethod
    def prompt_template(cls, config: ConfigT) -> PromptTemplate | None:
        """The words under which its text encoder was trained, and the policy samples; None: the
        policy's own stand."""
        return None

    @classmethod
    def negative_prompt(cls, config: ConfigT) -> str | None:
        """What the policy must encode for guidance to steer away from; None: nothing."""
        return None

    @classmethod
    def state_dim_of(cls, config: ConfigT) -> Count | None:
        """Width of the hidden states it will read, before it is loaded; None: unknown, or none."""
        return None

    def encode_sources(self, samples: Sequence[Sample], area_px: int) -> list[Sample]:
        """A user's own samples as the policy reads them: where it reads codes, with codes of each
        picture scaled to about `area_px`. Called outside of training."""
        return list(samples)

    def decode_sources(self, samples: Sequence[Sample]) -> list[Sample]:
        """The samples, with the pictures that exist only as codes drawn for rewards and records."""
        return list(samples)

    @abstractmethod
    def render(
        self, jobs: Iterable[RenderJob]
    ) -> Iterator[tuple[int, Image | RenderFailure | None]]:
        """Yield `(number of the job, RGB picture)` as each is ready, so that judging can start.
        Take jobs as they are needed: taking one may first condition its group. A picture depends
        on its job alone. None where nothing is drawn."""
