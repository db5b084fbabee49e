"""The reference for packed forwards: one row at a time through transformers' model.

It has stock attention, positions and vision tower, and a plain float64 softmax, without any
computation of `rl/policies`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_image_writer import expected_forced

from rl.api.types import Prompt


def stock(folder: str | Path) -> Any:
    """The model of a folder as transformers loads it."""
    from transformers import AutoModelForImageTextToText, Emu3ForCausalLM

    is_emu3 = "Emu3ForCausalLM" in Path(folder, "config.json").read_text()
    loader: Any = Emu3ForCausalLM if is_emu3 else AutoModelForImageTextToText
    return loader.from_pretrained(folder, dtype=torch.float32).eval()


@contextmanager
def stock_attention(language_model: Any) -> Iterator[None]:
    """Switches the policy's transformers model (with its adapters) to stock attention."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(language_model.config, "_attn_implementation", "sdpa")
        yield


def qwen_states(model: Any, prompt: Prompt, token_ids: Sequence[int]) -> torch.Tensor:
    """[P + T, D] of a `Qwen2_5_VLForConditionalGeneration`."""
    ids = torch.tensor([[*prompt.token_ids, *token_ids]])
    with stock_attention(model.model.language_model):
        out = model.model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=(ids == model.config.image_token_id).long(),
            use_cache=False,
            **prompt.model_inputs,
        )
    states: torch.Tensor = out.last_hidden_state[0]
    return states


def qwen_row(
    policy: Any, prompt: Prompt, token_ids: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """([P + T, D] states as the policy gives them to the renderer, [T] log-probs) of one row."""
    model = policy.module.base_model
    before_norm: list[torch.Tensor] = []
    norm = model.model.language_model.norm
    hook = norm.register_forward_pre_hook(lambda _, args: before_norm.append(args[0][0]))
    states = qwen_states(model, prompt, token_ids)
    hook.remove()
    head = model.lm_head.weight
    allowed = sorted(set(range(len(head))) - set(policy.banned_token_ids))
    temperature = policy.setup.temperature
    logps = logprobs(states, head, token_ids, temperature, [allowed] * len(token_ids))
    return (before_norm[0] if policy.setup.state_kind == "pre_norm" else states), logps


def emu3_row(
    policy: Any, prompt: Prompt, token_ids: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for an Emu3; a picture may have another grid than the prompt."""
    model, picture = policy.module.base_model, policy.image_vocabulary
    ids = torch.tensor([[*prompt.token_ids, *token_ids]])
    with stock_attention(model.model):
        states: torch.Tensor = model.model(ids, use_cache=False).last_hidden_state[0]
    text, codes = range(picture.visual_start), range(picture.visual_start, picture.visual_end)
    forced_T = expected_forced(token_ids, prompt.grid, picture)
    allowed_T = [
        [token] if forced else codes if token in codes else text
        for token, forced in zip(token_ids, forced_T, strict=True)
    ]
    temperature = policy.setup.temperature
    return states, logprobs(states, model.lm_head.weight, token_ids, temperature, allowed_T)


def logprobs(
    states: torch.Tensor,
    head: torch.Tensor,
    token_ids: Sequence[int],
    temperature: float,
    allowed_T: Sequence[Sequence[int]],
) -> torch.Tensor:
    """[T] float64 nats; `allowed_T[t]`: ids from which token t was drawn (0 nats if only one)."""
    num_tokens = len(token_ids)
    logits = states[-num_tokens - 1 : -1].double() @ head.double().T / temperature
    rows = []
    for row, token, allowed in zip(logits[-num_tokens:], token_ids, allowed_T, strict=True):
        among = torch.tensor(list(allowed))
        rows.append(row[token] - row[among].logsumexp(0))
    return torch.stack(rows) if rows else states.new_zeros(0)
