"""Denoising steps that are guessed instead of computed; none unless asked for.

What: of the velocities, every n-th is computed and those between follow the line through the two
computed last (TaylorSeer, Liu et al. 2025, of order 1 on the transformer's output). Which steps
these are depends on their number alone, so a picture does not depend on its batch mates, as it
would with caches that look at the change of a batch's mean. Imports torch for types only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

NUM_FIRST_STEPS = 3
"""Always computed: where most of the picture's layout is decided."""


def is_computed(step: int, interval: int) -> bool:
    """Whether step `step` (from 0) is, when one of `interval` is."""
    return step < NUM_FIRST_STEPS or (step - NUM_FIRST_STEPS + 1) % interval == 0


def extrapolate(computed: Sequence[tuple[int, torch.Tensor]], step: int) -> torch.Tensor:
    """The line through the last two (step, velocity), at `step`."""
    (before, earlier), (last, latest) = computed[-2:]
    return latest + (latest - earlier) * ((step - last) / (last - before))
