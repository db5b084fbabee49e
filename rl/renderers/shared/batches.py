"""Collects render jobs into batches; a failing batch fails its own jobs only."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from PIL.Image import Image

from rl.api.types import RenderFailure
from rl.ranks.error_messages import is_lost_device

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
