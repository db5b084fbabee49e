"""A tiny Emu3 that often writes pictures, and a reference for its log-probs.

`reference_logprobs` has the grammar as a list and the softmax as a loop, and shares no code with
the engines or the policy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny_emu3
import torch
from tiny_models import save

from rl.api.policy import PolicySetup
from rl.api.types import Completion, ImageVocabulary, Prompt

GRIDS = [(2, 3), (1, 1), (3, 2), (4, 1)]
EAGERNESS_NATS = 5.5
"""Mean logit of the image token, with which it is about one token in ten."""


@torch.no_grad()
def save_writer_folder(folder: Path) -> str:
    """As `tiny_emu3.save_policy_folder`, but with an image token every few tokens: all hidden
    states share a direction, which is added to the token's row of the head."""
    tokenizer = tiny_emu3.make_tokenizer()
    model = tiny_emu3.make_model(tokenizer)
    generator = torch.Generator().manual_seed(5)
    direction = torch.randn(64, generator=generator)
    model.model.embed_tokens.weight += 1.5 * direction / direction.norm()
    words = torch.randint(0, 500, (4, 60), generator=generator)
    mean = model.model(input_ids=words).last_hidden_state.mean((0, 1))
    image = tokenizer.convert_tokens_to_ids("<|image token|>")
    model.lm_head.weight[image] += EAGERNESS_NATS * mean / mean.dot(mean)
    return save(folder, model, tokenizer)


def build_policy(folder: str, lora: Any = None) -> Any:
    """The real policy in float32, with the grammar."""
    from rl.policies import emu3

    config = emu3.Config(
        type="emu3", model_path=folder, dtype="float32", max_prompt_tokens=64, lora=lora
    )
    return emu3.Emu3(config, PolicySetup("image_tokens", max_completion_tokens=64))


def build_prompts(policy: Any) -> list[Prompt]:
    """One prompt for each of GRIDS."""
    return [
        policy.build_prompt(tiny_emu3.sample(i, height=height, width=width))
        for i, (height, width) in enumerate(GRIDS)
    ]


def spelt(grid: tuple[int, int], vocabulary: ImageVocabulary) -> list[int | None]:
    """The tokens after an image token: the forced id, or None for any code."""
    height, width = grid
    row = [None] * width + [vocabulary.end_of_row]
    ends = [vocabulary.end_of_frame, vocabulary.end_of_image, vocabulary.end_of_sequence]
    return row * height + ends


def expected_forced(
    ids: tuple[int, ...], grid: tuple[int, int], vocabulary: ImageVocabulary
) -> tuple[bool, ...]:
    """Flags of a complete or cut completion."""
    begin = ids.index(vocabulary.image) + 1 if vocabulary.image in ids else len(ids)
    after = [token is not None for token in spelt(grid, vocabulary)]
    return (False,) * begin + tuple(after[: len(ids) - begin])


@torch.no_grad()
def reference_logprobs(
    model: Any,
    prompt: Prompt,
    completion: Completion,
    vocabulary: ImageVocabulary,
    temperature: float = 1.0,
    top_k: int = -1,
    top_p: float = 1.0,
) -> list[float]:
    """Log-probs from one plain forward of the stock model; -inf for forbidden tokens."""
    ids = completion.token_ids
    logits_TV = model(torch.tensor([prompt.token_ids + ids])).logits[0, :-1].float()
    num_ids = logits_TV.shape[1]
    begin = ids.index(vocabulary.image) + 1 if vocabulary.image in ids else len(ids)
    logprobs = []
    for t, row_V in enumerate(logits_TV[len(prompt.token_ids) - 1 :]):
        allowed = list(range(num_ids))
        if prompt.grid and t < begin:
            allowed = list(range(vocabulary.visual_start))
        elif prompt.grid:
            token = spelt(prompt.grid, vocabulary)[t - begin]
            codes = list(range(vocabulary.visual_start, vocabulary.visual_end))
            allowed = codes if token is None else [token]
        masked_V = torch.full((num_ids,), float("-inf"))
        masked_V[allowed] = row_V[allowed] / temperature
        probs_V, order = masked_V.softmax(-1).sort(descending=True)
        probs_V = probs_V[: top_k if top_k > 0 else num_ids]
        probs_V = probs_V / probs_V.sum()
        mass_before_V = probs_V.cumsum(-1) - probs_V
        probs_V = probs_V[mass_before_V < top_p]
        probs_V = probs_V / probs_V.sum()
        kept = dict(zip(order.tolist(), probs_V.log().tolist(), strict=False))
        logprobs.append(kept.get(ids[t], float("-inf")))
    return logprobs
