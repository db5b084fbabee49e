"""From noise to latents: the schedule, and the loop over its steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from rl.renderers.qwen_image.step_cache import extrapolate, is_computed
from rl.renderers.shared.scheduling import resolution_shift

Velocity = Callable[[int, torch.Tensor], torch.Tensor]
"""(number of the step, latents) -> velocity, both [B, tokens, channels]."""


def prepared(
    scheduler: Any,
    num_steps: int,
    num_tokens: int,
    device: Any,
    sigmas: Sequence[float] | None = None,
) -> Any:
    """A copy of a scheduler with timesteps set: `sigmas`, by default uniform ones, shifted by the
    picture's own token count (condition tokens do not count)."""
    scheduler = copy.deepcopy(scheduler)
    levels = np.linspace(1.0, 1 / num_steps, num_steps) if sigmas is None else np.array(sigmas)
    shift = resolution_shift(scheduler, num_tokens)
    scheduler.set_timesteps(sigmas=levels, device=device, mu=shift)
    scheduler.set_begin_index(0)
    return scheduler


def denoise(
    latents: torch.Tensor, scheduler: Any, velocity: Velocity, step_cache_interval: int
) -> torch.Tensor:
    """[B, tokens, channels] noise -> the same, clean; `scheduler`: `prepared` for this call."""
    computed: list[tuple[int, torch.Tensor]] = []
    for step, timestep in enumerate(scheduler.timesteps):
        if is_computed(step, step_cache_interval):
            guess = velocity(step, latents)
            computed = [*computed[-1:], (step, guess)]
        else:
            guess = extrapolate(computed, step)
        latents = scheduler.step(guess, timestep, latents, return_dict=False)[0]
    return latents
