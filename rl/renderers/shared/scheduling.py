"""Noise schedules of flow-matching checkpoints, and the loop over their steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, model_validator

from rl.config.schema import Section

if TYPE_CHECKING:
    import torch


class SchedulerOverrides(Section):
    """Keys of the checkpoint's scheduler config to replace; omitted keys keep their values.

    For Lightning adapters, set base_shift = max_shift = log 3 and shift_terminal = null.
    """

    use_dynamic_shifting: bool | None = None
    """Shift the sigmas by the picture's size (base_shift, max_shift), not by a constant `shift`."""
    base_shift: float | None = None
    """Log shift for a picture of base_image_seq_len tokens (usually 256)."""
    max_shift: float | None = None
    """Log shift for a picture of max_image_seq_len tokens (Qwen-Image 8192, SD3 4096); between the
    two lengths, it is interpolated linearly in the number of tokens."""
    shift: Annotated[float, Field(gt=0, le=1000)] | None = None
    """Constant shift factor, with use_dynamic_shifting: false."""
    shift_terminal: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Stretch the schedule so that its last sigma before 0 has this value; null = no stretch."""

    @model_validator(mode="after")
    def _only_shift_terminal_may_be_null(self) -> SchedulerOverrides:
        for key in sorted(self.model_fields_set - {"shift_terminal"}):
            if getattr(self, key) is None:
                raise ValueError(f"{key}: null is invalid; omit it to keep the checkpoint's value")
        return self


def override_scheduler(scheduler: Any, overrides: SchedulerOverrides) -> Any:
    """A copy of a diffusers scheduler with some keys of its config replaced."""
    return type(scheduler).from_config(scheduler.config, **overrides.model_dump(exclude_unset=True))


def prepared(scheduler: Any, num_tokens: int, device: Any, **schedule: Any) -> Any:
    """A copy of a diffusers scheduler with timesteps set to `schedule` (`sigmas` or
    `num_inference_steps`), shifted for a picture of `num_tokens` (not counting its sources).

    The log shift is interpolated between the checkpoint's base_shift and max_shift (Esser et al.
    2024, section 5.3.2); the scheduler uses it only with `use_dynamic_shifting`.
    """
    scheduler, anchors = copy.deepcopy(scheduler), scheduler.config
    slope = (anchors.max_shift - anchors.base_shift) / (
        anchors.max_image_seq_len - anchors.base_image_seq_len
    )
    shift = float(num_tokens * slope + (anchors.base_shift - slope * anchors.base_image_seq_len))
    scheduler.set_timesteps(device=device, mu=shift, **schedule)
    scheduler.set_begin_index(0)
    return scheduler


def denoise(
    latents: torch.Tensor, scheduler: Any, velocity: Callable[[int, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Turn noise into clean latents of the same shape.

    Args:
        scheduler: Returned by `prepared` for this call.
        velocity: (step index, latents) -> velocity, in the shape of the latents.
    """
    for step, timestep in enumerate(scheduler.timesteps):
        latents = scheduler.step(velocity(step, latents), timestep, latents, return_dict=False)[0]
    return latents
