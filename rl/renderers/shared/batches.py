"""Collects render jobs into batches; a failing batch fails its own jobs only."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from PIL.Image import Image

from rl.api.types import RenderFailure
from rl.ranks.error_messages import is_lost_device

logger = logging.getLogger(__name__)

Job = TypeVar("Job")
Bucket = TypeVar("Bucket", bound=Hashable)
Outcome = Image | RenderFailure
Fits = dict[Hashable, int]
"""Bucket -> most jobs to draw together; only buckets for which more did not fit in memory."""


def render_in_batches(
    jobs: Iterable[Job],
    bucket_or_outcome: Callable[[Job], Bucket | Outcome],
    size_of: Callable[[Bucket], int],
    render: Callable[[Sequence[Job], Bucket], list[Outcome]],
    fits: Fits,
) -> Iterator[tuple[int, Outcome]]:
    """Yield `(number of the job, outcome)`; a batch is rendered as soon as it is full.

    `bucket_or_outcome` returns a job's bucket, or its outcome, which is yielded at once. Jobs of
    one bucket are rendered together, `size_of(bucket)` at a time; incomplete batches are rendered
    after the last job, the oldest bucket first. The next job is taken only after every full batch
    is rendered, because taking it may run the policy's forward. The renderer keeps `fits` across
    calls, so that a batch size that ran out of memory is not tried again.
    """
    waiting: dict[Bucket, list[tuple[int, Job]]] = {}

    def render_waiting(bucket: Bucket) -> Iterator[tuple[int, Outcome]]:
        numbers, batch = zip(*waiting.pop(bucket), strict=True)
        return zip(numbers, _rendered(batch, bucket, render, fits), strict=True)

    for number, job in enumerate(jobs):
        bucket = bucket_or_outcome(job)
        if isinstance(bucket, Outcome):
            yield number, bucket
            continue
        waiting.setdefault(bucket, []).append((number, job))
        if len(waiting[bucket]) >= min(size_of(bucket), fits.get(bucket, math.inf)):
            yield from render_waiting(bucket)
    for bucket in list(waiting):
        yield from render_waiting(bucket)


def _rendered(
    jobs: Sequence[Job],
    bucket: Bucket,
    render: Callable[[Sequence[Job], Bucket], list[Outcome]],
    fits: Fits,
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
            reason = f"out_of_memory: {error}"
        except Exception as error:
            if is_lost_device(error):
                raise
            logger.exception("a batch of %d pictures failed", len(part))
            outcomes += [RenderFailure(f"exception: {type(error).__name__}: {error}")] * len(part)
            continue
        # After the `except` block, so that the failed attempt's tensors are freed before the retry.
        if len(part) == 1:
            outcomes.append(RenderFailure(reason))
            continue
        fits[bucket] = (len(part) + 1) // 2
        text = "renderer.batch_size: %d pictures of one size do not fit in memory, from now on %d"
        logger.warning(text, len(part), fits[bucket])
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return outcomes
