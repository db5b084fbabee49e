"""Draws and saves tiny models of the released classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


@torch.no_grad()
def draw(model: Any, std: float = 0.15, vectors_std: float = 0.0) -> Any:
    """Draws matrices so large that text, pictures and time steps change the model's output, and
    moves vectors (norms, biases) by `vectors_std`; returns the model in evaluation mode."""
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            parameter.normal_(0, 0.1 if "visual" in name else std)
        elif vectors_std:
            parameter.add_(vectors_std * torch.randn_like(parameter))
    return model.eval()


def save(folder: Path, *parts: Any) -> str:
    """Saves models, tokenizers and processors into one folder; returns its path as a string."""
    for part in parts:
        part.save_pretrained(folder)
    return str(folder)
