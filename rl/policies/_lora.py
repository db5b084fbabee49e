"""The adapter section that the policies share.

What: `LoraSection`. What not: wrapping a model (each policy knows its layers). Read by the `Config`
of every policy.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rl.config import Section


class LoraSection(Section):
    """The adapter that is trained; the base stays frozen."""

    r: Annotated[int, Field(ge=1)] = 32
    """Rank."""
    alpha: Annotated[float, Field(gt=0)] = 64
    """The adapter's output is scaled by alpha / r."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """On the adapter's input while training; above 0 the trainer is not the policy that sampled."""
    target_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    """Names of linear layers, in the language model only while the vision tower is frozen."""
    init_seed: int = 0
    """Seed of the adapter's initial A matrices (B starts at zero)."""
