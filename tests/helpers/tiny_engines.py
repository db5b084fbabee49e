"""Compares an engine's completions with the trainer's forward and with other completions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import pytest
import torch
from tiny_rounding import FORWARD_TOL

from rl.api.types import Completion, Prompt


def trainer_logprobs(policy: Any, prompt: Prompt, group: Sequence[Completion]) -> torch.Tensor:
    """Log-probs [G, C] of one group's packed row, nats, right-padded."""
    batch = policy.collate([(prompt, completion.token_ids) for completion in group])
    with torch.no_grad():
        logprobs: torch.Tensor = policy.module(batch).logprobs
    return logprobs


def max_dlogp(
    policy: Any, prompts_P: Sequence[Prompt], completions_PG: Sequence[Sequence[Completion]]
) -> float:
    """Largest |engine - trainer| over all tokens, nats."""
    return max(
        float(
            (trained_C[: len(completion.logprobs)] - torch.tensor(completion.logprobs)).abs().max()
        )
        for prompt, group in zip(prompts_P, completions_PG, strict=True)
        for completion, trained_C in zip(
            group, trainer_logprobs(policy, prompt, group), strict=True
        )
    )


def assert_same(
    ones_PG: Sequence[Sequence[Completion]], others_PG: Sequence[Sequence[Completion]]
) -> None:
    """The same tokens; log-probs up to rounding, which depends on a row's position in a batch."""
    for one, other in zip(chain(*ones_PG), chain(*others_PG), strict=True):
        assert (one.token_ids, one.finish) == (other.token_ids, other.finish)
        assert one.logprobs == pytest.approx(other.logprobs, abs=FORWARD_TOL)


def assert_ended(group: Sequence[Completion], stop_ids: Sequence[int], max_tokens: int) -> None:
    """Some completions end with their only stop token; the others have `max_tokens` and no stop."""
    for completion in group:
        ids = completion.token_ids
        stops = [i for i, token in enumerate(ids) if token in stop_ids]
        stopped = completion.finish == "stop"
        assert stops == ([len(ids) - 1] if stopped else [])
        assert stopped or len(ids) == max_tokens
        assert len(completion.logprobs) == len(ids)
    assert {completion.finish for completion in group} == {"stop", "length"}
