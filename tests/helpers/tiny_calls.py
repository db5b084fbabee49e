"""Notes the calls of a module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def calls_of(module: torch.nn.Module, measure: Callable[[Any, Any, Any], Any]) -> list[Any]:
    """A list that receives `measure(args, kwargs, output)` of every later call of `module`."""
    noted: list[Any] = []
    module.register_forward_hook(
        lambda _, args, kwargs, output: noted.append(measure(args, kwargs, output)),
        with_kwargs=True,
    )
    return noted


def pictures_read(policy: Any) -> list[int]:
    """A list that receives the number of pictures of every later call of the vision tower."""
    tower = policy.module.base_model.model.visual
    return calls_of(tower, lambda args, kwargs, output: len(kwargs["grid_thw"]))
