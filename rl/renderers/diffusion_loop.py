"""What the diffusion renderers share once models are loaded: batches over jobs, and the loop."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch
from PIL.Image import Image

from rl.api.plugin import FrozenModelConfig
from rl.api.types import RenderFailure, RenderJob
from rl.files import over_white
from rl.ranks.signals import is_lost_device

# ---- batches -------------------------------------------------------------------------------------
# Collects render jobs into batches; a failing batch fails its own jobs only.

logger = logging.getLogger(__name__)

Job = TypeVar("Job")
Outcome = Image | RenderFailure
Fits = dict[Hashable, int]
"""Key of a batch -> most jobs to draw together; only keys for which more did not fit in memory."""
OUT_OF_MEMORY = "out_of_memory"
"""The reason of a failure starts with this if the batch did not fit in memory."""


def batches_of(
    jobs: Iterable[Job], batch_of: Callable[[Job], tuple[Hashable, int]], fits: Fits
) -> Iterator[tuple[Any, list[tuple[int, Job]]]]:
    """Yield `(key, [(number of the job, job), ...])` for each batch, in the order of its last job.

    `batch_of` returns a job's key and the limit of its batch, as `Renderer.batch_of` does. A batch
    is yielded as soon as it is full, incomplete ones after the last job. The next job is taken only
    when the next batch is requested, because taking it may run the policy's forward.
    """
    waiting: dict[Hashable, list[tuple[int, Job]]] = {}
    for number, job in enumerate(jobs):
        key, limit = batch_of(job)
        waiting.setdefault(key, []).append((number, job))
        if len(waiting[key]) >= min(limit, fits.get(key, math.inf)):
            yield key, waiting.pop(key)
    yield from waiting.items()


def render_in_batches(
    jobs: Iterable[Job],
    batch_of: Callable[[Job], tuple[Hashable, int]],
    known: Callable[[Job], Outcome | None],
    render: Callable[[Sequence[Job], Any], list[Outcome]],
    fits: Fits,
    may_split: bool = True,
) -> Iterator[tuple[int, Outcome]]:
    """Yield `(number of the job, outcome)`, batch by batch (`batches_of`).

    `known` returns the outcome of a job that needs no drawing, else None; `render` draws the others
    of a batch. The renderer keeps `fits` across calls, so that a batch size that ran out of memory
    is not tried again. `may_split` False: a batch that does not fit in memory fails as a whole.
    """
    for key, batch in batches_of(jobs, batch_of, fits):
        to_draw = []
        for number, job in batch:
            if (outcome := known(job)) is None:
                to_draw.append((number, job))
            else:
                yield number, outcome
        outcomes = _rendered([job for _, job in to_draw], key, render, fits, may_split)
        yield from zip((number for number, _ in to_draw), outcomes, strict=True)


def _rendered(
    jobs: Sequence[Job],
    bucket: Hashable,
    render: Callable[[Sequence[Job], Any], list[Outcome]],
    fits: Fits,
    may_split: bool,
) -> list[Outcome]:
    """One outcome per job of a batch, drawn in parts that fit in memory.

    An exception fails only the jobs of its part; if the device is lost, it is raised.
    """
    outcomes: list[Outcome] = []
    while part := jobs[len(outcomes) :][: fits.get(bucket, len(jobs))]:
        try:
            outcomes += render(part, bucket)
            continue
        except torch.OutOfMemoryError as error:
            reason = f"{OUT_OF_MEMORY}: {error}"
        except Exception as error:
            if is_lost_device(error):
                raise
            logger.exception("a batch of %d pictures failed", len(part))
            outcomes += [RenderFailure(f"exception: {type(error).__name__}: {error}")] * len(part)
            continue
        # After the `except` block, so that the failed attempt's tensors are freed before the retry.
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if len(part) == 1 or not may_split:
            outcomes += [RenderFailure(reason)] * len(part)
            continue
        fits[bucket] = (len(part) + 1) // 2
        text = "renderer.batch_size: %d pictures of one size do not fit in memory, from now on %d"
        logger.warning(text, len(part), fits[bucket])
    return outcomes


# ---- decoding ------------------------------------------------------------------------------------
# Seeded noise, VAE calls in slices that fit in memory, and checks of pictures for NaN.

DECODED_PX_AT_ONCE = 1024 * 1024
"""Total picture area of one VAE call, for encoding as well as decoding: one 1024^2 picture keeps
a GPU busy by itself; smaller pictures are batched."""


def seeded_noise(seeds_B: Iterable[int], shape: Sequence[int]) -> torch.Tensor:
    """Standard-normal noise [B, *shape], float32 on the CPU: a row depends only on its seed,
    not on the device, the dtype or the batch."""
    return torch.stack(
        [
            torch.randn(
                *shape, generator=torch.Generator("cpu").manual_seed(seed), dtype=torch.float32
            )
            for seed in seeds_B
        ]
    )


def in_slices(
    rows: torch.Tensor, run: Callable[[torch.Tensor], torch.Tensor], picture_px: int
) -> torch.Tensor:
    """Apply `run` to slices of a batch, each with as many rows as fit into DECODED_PX_AT_ONCE;
    `picture_px`: area of a row's picture."""
    return torch.cat([run(part) for part in rows.split(max(1, DECODED_PX_AT_ONCE // picture_px))])


def to_pictures(
    tensor: torch.Tensor, as_images: Callable[[torch.Tensor], list[Image]]
) -> list[Image | RenderFailure]:
    """Convert [B, C, H, W] with `as_images`, transparent parts to white; a row with NaN or infinity
    becomes a failure."""
    finite_B = torch.isfinite(tensor).flatten(1).all(dim=1).tolist()
    return [
        over_white(picture)
        if is_finite
        else RenderFailure("non_finite: the renderer produced NaN or infinity")
        for picture, is_finite in zip(as_images(torch.nan_to_num(tensor)), finite_B, strict=True)
    ]


# ---- diffusion loop ------------------------------------------------------------------------------
# Draws batches of jobs with a frozen diffusion model.

ConfigT = TypeVar("ConfigT", bound=FrozenModelConfig)
BucketT = TypeVar("BucketT", bound=Hashable)


class DiffusionLoop(ABC, Generic[ConfigT, BucketT]):
    """Draws the jobs of one bucket together. A picture depends only on its own job: the other jobs
    of the batch change it only by float rounding."""

    state_dim: int | None = None
    """Width of the hidden states that the renderer reads; None if it reads none."""

    def __init__(self, config: ConfigT, parts: Any, vae_factor: int) -> None:
        """`vae_factor`: the sides of pictures for the VAE are multiples of this, px."""
        from diffusers.image_processor import VaeImageProcessor

        self.config = config
        self.parts = parts
        self._pixels = VaeImageProcessor(vae_scale_factor=vae_factor)
        self.may_split = True
        """Whether a batch that does not fit in memory is halved; else it fails."""
        self._fits: Fits = {}

    def render(self, jobs: Iterable[RenderJob]) -> Iterator[tuple[int, Outcome]]:
        """Yield `(number of the job, picture or failure)`, batch by batch, as batches fill.

        Pictures are RGB; transparent parts become white. An exception in a batch fails only the
        jobs of this batch. A batch that does not fit in memory is halved until it fits.
        """
        return render_in_batches(
            jobs,
            lambda job: (self.bucket_of(self.config, job), self.config.batch_size),
            self._failure_of,
            lambda batch, bucket: to_pictures(
                self.render_tensor(batch, bucket), self._pixels.postprocess
            ),
            self._fits,
            self.may_split,
        )

    def take_metrics(self) -> dict[str, float]:
        """The plugin's `metrics` since the last call."""
        return {}

    @staticmethod
    def bucket_of(config: Any, job: RenderJob) -> Any:
        """The settings that jobs must share to be drawn in one batch; hashable. None: all can."""
        return None

    def _failure_of(self, job: RenderJob) -> RenderFailure | None:
        """Why a job cannot be drawn; None if it can."""
        return None

    @abstractmethod
    def render_tensor(self, jobs: Sequence[RenderJob], bucket: BucketT) -> torch.Tensor:
        """Render jobs of one bucket: [B, 3 or 4, H, W], the renderer's dtype, nominally -1..1."""
