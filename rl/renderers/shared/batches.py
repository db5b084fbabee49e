"""Jobs come one by one, pictures are made in batches: which jobs wait for which, and what fails.

`render_or_halve` is the one place where a renderer's exceptions become `RenderFailure`s.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from PIL.Image import Image

from rl.api.types import RenderFailure

logger = logging.getLogger(__name__)

Job = TypeVar("Job")
Bucket = TypeVar("Bucket", bound=Hashable)
Outcome = Image | RenderFailure


def render_in_batches(
    jobs: Iterable[Job],
    place: Callable[[Job], Bucket | Outcome],
    size_of: Callable[[Bucket], int],
    render: Callable[[Sequence[Job], Bucket], list[Outcome]],
) -> Iterator[tuple[int, Outcome]]:
    """Yield `(number of the job, outcome)`; a batch is rendered as soon as it is full.

    `place` says in which bucket a job waits, or what has become of it already, which is passed on
    at once. Jobs of one bucket are rendered together, `size_of(bucket)` at a time; what is left
    when the jobs end is rendered then, the longest waiting first. A job is taken only when all that
    could be rendered without it is: taking it may mean conditioning its group first.
    """
    waiting: dict[Bucket, list[tuple[int, Job]]] = {}

    def render_waiting(bucket: Bucket) -> Iterator[tuple[int, Outcome]]:
        numbers, batch = zip(*waiting.pop(bucket), strict=True)
        return zip(numbers, render_or_halve(lambda part: render(part, bucket), batch), strict=True)

    for number, job in enumerate(jobs):
        placed = place(job)
        if isinstance(placed, Outcome):
            yield number, placed
            continue
        waiting.setdefault(placed, []).append((number, job))
        if len(waiting[placed]) >= size_of(placed):
            yield from render_waiting(placed)
    for bucket in list(waiting):
        yield from render_waiting(bucket)


def render_or_halve(
    render: Callable[[Sequence[Job]], list[Outcome]], jobs: Sequence[Job]
) -> list[Outcome]:
    """One outcome per job of a batch; a batch that does not fit in memory is halved until it does.

    An exception fails the jobs of its own (half) batch and no others.
    """
    try:
        return render(jobs)
    except torch.OutOfMemoryError as error:
        reason = f"out_of_memory: {error}"
    except Exception as error:
        logger.exception("a batch of %d pictures failed", len(jobs))
        return [RenderFailure(f"exception: {type(error).__name__}: {error}")] * len(jobs)
    # Outside the `except`, so that the failed attempt's tensors are free before the retry.
    if len(jobs) == 1:
        return [RenderFailure(reason)]
    logger.warning("renderer.batch_size: %d pictures do not fit, trying half", len(jobs))
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    half = len(jobs) // 2
    return render_or_halve(render, jobs[:half]) + render_or_halve(render, jobs[half:])
