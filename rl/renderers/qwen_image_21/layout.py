"""Positions of a row's tokens on three axes, and the rotary tables they select.

Legend: T tokens; E values of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

Piece = int | tuple[int, int]
"""So many tokens of text, or a picture of (rows, columns)."""


def num_tokens(piece: Piece) -> int:
    return piece if isinstance(piece, int) else piece[0] * piece[1]


def end_of(pieces: Sequence[Piece], start: int = 0) -> int:
    """The position behind these pieces, the first of which stands at `start`."""
    return start + sum(p if isinstance(p, int) else max(p) for p in pieces)


def positions(pieces: Sequence[Piece], start: int = 0) -> torch.Tensor:
    """[T, 3] int64 of the tokens of `pieces`, the first of which stands at `start`.

    A token of text is one further than the last on all three axes. A picture stays at one place of
    the first; the other two are its rows and columns, counted from its middle.
    """
    placed = [torch.empty(0, 3, dtype=torch.long)]
    for piece in pieces:
        if isinstance(piece, int):
            placed.append(torch.arange(start, start + piece)[:, None].expand(-1, 3))
        else:
            axes = (torch.arange(side) - (side - side // 2) for side in piece)
            placed.append(torch.cartesian_prod(torch.tensor([start]), *axes))
        start = end_of([piece], start)
    return torch.cat(placed)


class Rotary:
    """The rotary table of one transformer, on its device."""

    def __init__(self, transformer: Any) -> None:
        self._axes = [
            torch.view_as_real(axis).to(transformer.device) for axis in transformer.pos_embed.freqs
        ]

    def of(self, positions_T: torch.Tensor) -> torch.Tensor:
        """[T, 3] -> [T, 1, E / 2, 2] float32, cosine and sine."""
        places = positions_T.to(self._axes[0].device).unbind(-1)
        turns = [axis[place] for axis, place in zip(self._axes, places, strict=True)]
        return torch.cat(turns, dim=-2).unsqueeze(1)
