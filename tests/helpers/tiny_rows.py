"""Rows of several prompts for each family of policies, and a forward on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import tiny_emu3
import tiny_qwen
import torch

from rl.api.types import Row, Sample
from rl.policies.emu3 import Emu3

LENGTHS = ((7, 1, 0, 12), (3,), (9, 9))
"""Completion lengths of three groups."""


def logprobs(policy: Any, rows: Sequence[Row]) -> torch.Tensor:
    """[B, T] of a forward without a graph."""
    with torch.no_grad():
        values: torch.Tensor = policy.module(policy.collate(rows)).logprobs
    return values


def random_rows(policy: Any, samples: Sequence[Sample]) -> list[Row]:
    generator = torch.Generator().manual_seed(0)
    return [
        (prompt, tuple(torch.randint(10, 250, (length,), generator=generator).tolist()))
        for prompt, lengths in zip(map(policy.build_prompt, samples), LENGTHS, strict=True)
        for length in lengths
    ]


def pictured_rows(policy: Any) -> list[Row]:
    """Rows of three prompts with pictures of different sizes."""
    sizes = ((128, 64), (64, 96), (64, 64))
    samples = [tiny_qwen.sample(i, width=w, height=h) for i, (w, h) in enumerate(sizes)]
    return random_rows(policy, samples)


def mixed_rows(policy: Any) -> list[Row]:
    """Rows of three prompts: three pictures, none, and one of the three."""
    pictures = [
        tiny_qwen.picture(i, *size) for i, size in enumerate([(64, 64), (128, 64), (64, 96)])
    ]
    return random_rows(
        policy,
        [
            replace(tiny_qwen.sample(i), sources=tuple(sources))
            for i, sources in enumerate((pictures, [], pictures[1:2]))
        ],
    )


def painted_rows(policy: Any) -> list[Row]:
    """Pictures of two grids, one after a thought, one cut off; only words; an empty completion."""
    samples = [tiny_emu3.sample(0), tiny_emu3.sample(1, height=2, width=3)]
    first, second = (policy.build_prompt(sample) for sample in samples)
    write = policy.prompts.picture_completion
    return [
        (first, write(samples[0].target_codes)),
        (first, write(samples[1].target_codes)[:9]),
        (first, ()),
        (second, write(samples[1].target_codes, thought=" a red sky")),
        (second, policy.encode_completion("no idea").token_ids),
    ]


def rows_of(policy: Any) -> list[Row]:
    """Rows for a policy of any family."""
    return painted_rows(policy) if isinstance(policy, Emu3) else pictured_rows(policy)
