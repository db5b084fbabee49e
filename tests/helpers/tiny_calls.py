"""Notes the calls of modules and functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch


def calls_of(module: torch.nn.Module, measure: Callable[[Any, Any, Any], Any]) -> list[Any]:
    """A list that receives `measure(args, kwargs, output)` of every later call of `module`."""
    noted: list[Any] = []
    module.register_forward_hook(
        lambda _, args, kwargs, output: noted.append(measure(args, kwargs, output)),
        with_kwargs=True,
    )
    return noted


def noted_calls(
    patch: pytest.MonkeyPatch, owner: Any, name: str, measure: Callable[[Any, Any, Any], Any]
) -> list[Any]:
    """The same for a function or method `name` of `owner`."""
    noted: list[Any] = []
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        noted.append(measure(args, kwargs, output))
        return output

    patch.setattr(owner, name, call)
    return noted


def pictures_read(policy: Any) -> list[int]:
    """A list that receives the number of pictures of every later call of the vision tower."""
    tower = policy.module.base_model.model.visual
    return calls_of(tower, lambda args, kwargs, output: len(kwargs["grid_thw"]))
