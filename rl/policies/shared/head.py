"""What log-probs are computed from: hidden states -> logits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Head(Protocol):
    """A vocabulary projection; a module's call, so that sharded training can gather its weight."""

    out_features: int

    def __call__(self, hidden: torch.Tensor, /) -> torch.Tensor:
        """[N, D] -> [N, out_features] logits."""
        ...

    def parameters(self) -> Iterator[torch.nn.Parameter]: ...
