"""The base class of renderers: frozen generators of pictures (docs/plugins.md has an example)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from rl.api.plugin import ConfigT, Count, ModelRunner, Resources, brief
from rl.api.types import ActionKind, PromptTemplate, RenderFailure, RenderJob, Sample, StateKind

if TYPE_CHECKING:
    from PIL.Image import Image


class Renderer(ModelRunner[ConfigT]):
    """A plugin of `rl/renderers`: draws a picture from the policy's output."""

    accepts: ClassVar[ActionKind]
    """What it takes: 'hidden_states', 'text' or 'image_tokens'."""
    state_kind: ClassVar[StateKind] = "post_norm"
    """Which hidden states it reads, if any: those after or before the policy's final norm."""
    makes_images: ClassVar[bool] = True
    """False: it draws no picture, and rewards read only the completion."""
    needs_source: ClassVar[bool] = False
    """True: it edits, and a run whose data has no source pictures is refused."""
    reads_transparency: ClassVar[bool] = False
    """True: a sample's transparent sources stay RGBA; False: they are composited on white."""

    state_dim: int | None = None
    """Width of the hidden states it reads; None when it reads none."""

    def __init__(self, config: ConfigT, resources: Resources) -> None:
        """Called once per rank before the first iteration. Raises ValueError for user errors."""
        self.config = config

    @classmethod
    def prompt_template(cls, config: ConfigT) -> PromptTemplate | None:
        """The prompt with which its text encoder was trained; the policy then samples with it.
        None: the policy keeps its own prompt."""
        return None

    @classmethod
    def negative_prompt(cls, config: ConfigT) -> str | None:
        """The prompt that the policy encodes for guidance to steer away from; None: no prompt."""
        return None

    @classmethod
    def state_dim_of(cls, config: ConfigT) -> Count | None:
        """Width of the hidden states it reads, known before loading; None: unknown, or none."""
        return None

    @classmethod
    def needs_source_with(cls, config: ConfigT) -> bool:
        """Whether it edits with this section; by default, what `needs_source` says."""
        return cls.needs_source

    @classmethod
    def check_sources(cls, config: ConfigT, sizes: Sequence[tuple[int, int] | None]) -> None:
        """Raises UnusableSampleError if it cannot draw from source pictures of these sizes
        ((width, height), px; None: unknown). Called for each row before a model is loaded."""

    def encode_sources(self, samples: Sequence[Sample], area_px: int) -> list[Sample]:
        """Prepare a user's own samples for the policy. If the policy reads codes, this scales each
        picture to about `area_px` and encodes it. Called outside of training."""
        return list(samples)

    def decode_sources(self, samples: Sequence[Sample]) -> list[Sample]:
        """The samples; sources that exist only as codes are decoded, for rewards and records."""
        return list(samples)

    @classmethod
    def batch_of(cls, config: ConfigT, job: RenderJob) -> tuple[Hashable, int]:
        """(key, limit): `render` draws jobs with equal keys together, at most `limit` of them, in
        their order. A pool of renderers sends such batches to its workers, so that they draw the
        same bits; by default it sends each job alone."""
        return None, 1

    @abstractmethod
    def render(
        self, jobs: Iterable[RenderJob]
    ) -> Iterator[tuple[int, Image | RenderFailure | None]]:
        """Yield `(number of the job, RGB picture)` as each is ready, so that judging can start.
        Take jobs lazily: taking one may first compute its group's conditioning. A picture must
        depend on its job alone. None instead of a picture: nothing is drawn."""


def drawn_problem(drawn: Any, waiting: Collection[int], makes_images: bool) -> str:
    """Why what `render` yields is unusable; '' if it is not. `waiting`: numbers of the jobs without
    a picture."""
    from PIL.Image import Image

    if isinstance(drawn, tuple) and len(drawn) == 2 and drawn[0] in waiting:
        picture = drawn[1]
        is_rgb = isinstance(picture, Image) and picture.mode == "RGB" and min(picture.size) > 0
        is_none = picture is None and not makes_images
        if is_rgb or is_none or isinstance(picture, RenderFailure):
            return ""
    expected = "(number of the job, RGB picture or RenderFailure), once for each job"
    return f"yields {brief(drawn)}; expected {expected}"
