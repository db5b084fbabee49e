"""Decodes completions to actions as the rollout does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rl.api.types import Action, Completion, Prompt, Row


def act(policy: Any, rows: Sequence[Row]) -> list[Action]:
    """Actions of one micro-batch, after a forward if the policy needs one."""
    if not policy.reads_states:
        return policy.decode_actions(rows, None, None)
    batch = policy.collate_states(rows) or policy.collate(rows)
    with torch.no_grad():
        return policy.decode_actions(rows, batch, policy.module(batch))


def act_group(policy: Any, prompt: Prompt, completions_G: Sequence[Completion]) -> list[Action]:
    """Actions of one prompt's completions."""
    return act(policy, [(prompt, completion.token_ids) for completion in completions_G])
