"""Rendering a batch that may not fit: halved until it does, and a failure stays its own jobs'.

What: the one place where a renderer's exceptions become `RenderFailure`s. What not: how pictures
are made, and which jobs share a batch. Called by the renderers' loops. Imports torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from PIL.Image import Image

from rl.types import RenderFailure

logger = logging.getLogger(__name__)

Job = TypeVar("Job")


def render_or_halve(
    render: Callable[[Sequence[Job]], list[Image | RenderFailure]], jobs: Sequence[Job]
) -> list[Image | RenderFailure]:
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
