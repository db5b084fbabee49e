"""What a sampler drew, held against the trainer's own forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rl.api.types import Completion, Prompt


def trainer_logprobs(policy: Any, prompt: Prompt, group: Sequence[Completion]) -> torch.Tensor:
    """[G, C] nats, right-padded, of one group's packed row."""
    batch = policy.collate([(prompt, completion.token_ids) for completion in group])
    with torch.no_grad():
        logprobs: torch.Tensor = policy.module(batch).logprobs
    return logprobs


def max_dlogp(
    policy: Any, prompts_P: Sequence[Prompt], completions_PG: Sequence[Sequence[Completion]]
) -> float:
    """Largest |sampler - trainer| over all tokens, nats."""
    return max(
        float(
            (trained_C[: len(completion.logprobs)] - torch.tensor(completion.logprobs)).abs().max()
        )
        for prompt, group in zip(prompts_P, completions_PG, strict=True)
        for completion, trained_C in zip(
            group, trainer_logprobs(policy, prompt, group), strict=True
        )
    )
