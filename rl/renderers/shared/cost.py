"""What one denoising step of Qwen-Image-Edit's transformer computes, from sizes alone.

Row lengths hardly ever repeat: counting the operations of every new combination, as
`flop_meter.counted` does for the VAE and Stable Diffusion 3, would cost more than it tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rl.meter.flop_meter import Work

ASKING, KEYS, MLP = 2, 2, 8
"""A block's matrices for each of its two streams, in D^2: query and output, key and value, MLP."""


def denoising_work(
    config: Any,
    num_targets: int,
    num_sources: int,
    num_words: Sequence[int],
    bytes_per_value: int,
) -> Work:
    """One step of `Denoiser.velocity`; modulation comes from its table, and the last block computes
    only what the picture's own tokens read.

    Args:
        config: of the transformer.
        num_targets: tokens of each row's picture.
        num_sources: of its sources together.
        num_words: of its conditioning, row by row.
        bytes_per_value: of the weights.
    """
    width = config.num_attention_heads * config.attention_head_dim
    num_rows, num_image = len(num_words), num_targets + num_sources
    num_tokens = num_rows * num_image + sum(num_words)
    num_pairs = sum((num_image + words) ** 2 for words in num_words)
    last_pairs = sum(num_targets * (num_image + words) for words in num_words)
    earlier = config.num_layers - 1
    products = width**2 * (
        num_tokens * (earlier * (ASKING + KEYS + MLP) + KEYS)
        + num_rows * num_targets * (ASKING + MLP)
    )
    out_channels = config.patch_size**2 * config.out_channels
    products += num_rows * num_targets * width * (config.in_channels + out_channels)
    products += 2 * width * (earlier * num_pairs + last_pairs)
    num_weights = 2 * config.num_layers * (ASKING + KEYS + MLP) * width**2
    return Work(2.0 * products, num_weights * bytes_per_value)
