"""Renderer plug: nothing to render. The action is text, and rewards read it as it is.

What: the renderer's contract with no pictures in it. Called by `build.py` and the config check.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rl.api.types import ActionKind, PromptTemplate, RenderJob, Sample
from rl.config.schema import Section

ACCEPTS: ActionKind = "text"
MAKES_IMAGES = False


class Config(Section):
    """`renderer: { type: 'none' }`."""

    type: str
    """Name of the plug."""


def prompt_template(config: Config) -> PromptTemplate | None:
    """None: the policy's own template stands."""
    return None


def negative_prompt(config: Config) -> str | None:
    """None: nothing is guided."""
    return None


def validate(config: Config) -> list[str]:
    """There is nothing to get wrong."""
    return []


def parameter_counts(config: Config) -> dict[str, float]:
    """Nothing is resident."""
    return {}


def activation_counts(config: Config) -> dict[str, float]:
    """Nothing is computed."""
    return {}


def build(config: Config, device: str) -> NoRenderer:
    """Ready at once, on no device."""
    return NoRenderer()


class NoRenderer:
    """See `rl.api.contracts.Renderer`."""

    state_dim = None

    def decode_sources(self, samples: Sequence[Sample]) -> list[Sample]:
        """As they are: nothing here draws."""
        return list(samples)

    def take_stats(self) -> dict[str, float]:
        """Nothing to report."""
        return {}

    def render(self, jobs: Iterable[RenderJob]) -> Iterator[tuple[int, None]]:
        """Yield `(number of the job, None)` for every job, in order, before the next is taken."""
        for number, _ in enumerate(jobs):
            yield number, None
