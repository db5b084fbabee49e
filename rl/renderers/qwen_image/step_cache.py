"""Extrapolates velocities instead of computing them (TaylorSeer, Liu et al. 2025, of order 1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

NUM_FIRST_STEPS = 3
"""Always computed: where most of the picture's layout is decided."""


def is_computed(step: int, interval: int) -> bool:
    """Whether step `step` (from 0) is computed, when one of `interval` is. It depends on the step's
    number alone, so that a picture does not depend on its batch mates."""
    return step < NUM_FIRST_STEPS or (step - NUM_FIRST_STEPS + 1) % interval == 0


def extrapolate(computed: Sequence[tuple[int, torch.Tensor]], step: int) -> torch.Tensor:
    """The line through the last two (step, velocity), at `step`."""
    (before, earlier), (last, latest) = computed[-2:]
    return latest + (latest - earlier) * ((step - last) / (last - before))
