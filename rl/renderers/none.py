"""Renderer plugin that renders nothing: rewards read the action's text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rl.api.renderer import Renderer
from rl.api.types import RenderJob


class NoRenderer(Renderer):
    """Draws nothing: rewards read the policy's text."""

    accepts = "text"
    makes_images = False

    def render(self, jobs: Iterable[RenderJob]) -> Iterator[tuple[int, None]]:
        """Yield `(number of the job, None)` for each job before the next job is fetched."""
        for number, _ in enumerate(jobs):
            yield number, None
