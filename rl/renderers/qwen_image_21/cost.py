"""What a batch of Qwen-Image-2.1 computes, from sizes alone; see `rl/renderers/shared/cost.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rl.meter.flop_meter import Work
from rl.renderers.qwen_image_21.layout import Piece, num_tokens

ATTENTION, KEYS = 4, 2
"""A block's matrices in D^2: query, key, value and output; key and value alone."""
MLP = 3
"""Its MLP's matrices, each of `mlp_ratio` D^2."""
TIME_CHANNELS = 256
"""Of the timestep, before it is embedded."""


@dataclass(frozen=True)
class Sizes:
    """Of a batch, in tokens."""

    pieces: Sequence[Sequence[Piece]]
    """What each group begins with."""
    words: Sequence[Sequence[int]]
    """What follows in each row of each group."""
    num_targets: int
    """Of each row's picture."""


def preparing_work(config: Any, sizes: Sizes, bytes_per_value: int) -> Work:
    """`Denoiser.prepare`; the last block's keys and values alone.

    Args:
        config: of the transformer.
        bytes_per_value: of the weights.
    """
    width = config.num_attention_heads * config.attention_head_dim
    starts = [sum(map(num_tokens, pieces)) for pieces in sizes.pieces]
    text = sum(piece for pieces in sizes.pieces for piece in pieces if isinstance(piece, int))
    words = [n for row in sizes.words for n in row]
    pictures = sum(starts) - text
    earlier = config.num_layers - 1
    pairs = 0.0
    for pieces, start, words_R in zip(sizes.pieces, starts, sizes.words, strict=True):
        at = 0
        for length in map(num_tokens, pieces):
            at += length
            pairs += length * at
        pairs += sum(n * (n + 1) / 2 + n * start for n in words_R)
    tokens = sum(starts) + sum(words)
    products = width**2 * tokens * (earlier * _block(config) + KEYS) + 2 * width * earlier * pairs
    products += (text + sum(words)) * width * (config.context_in_dim + width)
    products += pictures * width * config.in_channels
    passes = 2 if sum(starts) else 1
    products += passes * _modulation(width)
    return Work(2.0 * products, passes * _weights(config) * bytes_per_value)


def step_work(config: Any, sizes: Sizes, bytes_per_value: int) -> Work:
    """One `Denoiser.velocity`; arguments as above."""
    width = config.num_attention_heads * config.attention_head_dim
    targets = sizes.num_targets
    pairs = 0
    for pieces, words_R in zip(sizes.pieces, sizes.words, strict=True):
        start = sum(map(num_tokens, pieces))
        pairs += sum(targets * (start + n + targets) for n in words_R)
    tokens = targets * sum(len(words_R) for words_R in sizes.words)
    products = tokens * width**2 * config.num_layers * _block(config)
    products += tokens * width * (config.in_channels + config.out_channels)
    products += 2 * width * config.num_layers * pairs + _modulation(width)
    return Work(2.0 * products, _weights(config) * bytes_per_value)


def _block(config: Any) -> int:
    return ATTENTION + MLP * int(config.mlp_ratio)


def _weights(config: Any) -> float:
    width = config.num_attention_heads * config.attention_head_dim
    return float(config.num_layers * _block(config) * width**2)


def _modulation(width: int) -> float:
    """Of one timestep: embedded by two layers, then four scales and gates, and the last scale."""
    return float(width * TIME_CHANNELS + (1 + 4 + 1) * width**2)
