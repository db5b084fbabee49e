"""Tunings that need no change of TRL: a vision tower that caches pictures, and shared prompts.

With a shared prompt the trainer forwards it once for all of its completions. At its first use the
results are asserted to equal those of plain TRL (`EQUAL`).

Axes: `_G` completions of one prompt, `P` its tokens, `T` completion tokens, `D` hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import torch
from cachetools import LRUCache

EQUAL = 1e-4
"""Tolerance of log-probs (nats), hidden states and gradients; the order of float32 sums differs."""
NUM_CACHED_PICTURES = 8


@dataclass(frozen=True)
class Tuning:
    """How TRL is tuned."""

    tuned: bool = True
    """False: 'stock' (one completion per micro-batch, diffusers' pipeline)."""
    caches_features: bool = False
    """The tower encodes a picture once per iteration, not once per completion and pass."""
    prompt_once: Literal["never", "without gradients", "always"] = "never"
    """Passes that forward a prompt once for all of its completions, which read its keys and values:
    none, those without gradients (conditioning, reference), or also the trained forward."""


def cache_features(body: Any) -> None:
    """Caches the picture features of `body`, a `Qwen2_5_VLModel` with a frozen tower."""
    plain = body.get_image_features
    cache: LRUCache[bytes, torch.Tensor] = LRUCache(NUM_CACHED_PICTURES)

    def cached(pixel_values: torch.Tensor, image_grid_thw: torch.Tensor, **kwargs: Any) -> Any:
        features = []
        sizes = image_grid_thw.prod(-1).tolist()
        for patches, grid in zip(pixel_values.split(sizes), image_grid_thw, strict=True):
            key = patches.numpy().tobytes()
            if key not in cache:
                with torch.no_grad():
                    cache[key] = plain(patches, grid[None], **kwargs).pooler_output[0]
            features.append(cache[key])
        return SimpleNamespace(pooler_output=tuple(features))

    body.get_image_features = cached


def prompt_once(
    body: Any, prompt: Mapping[str, torch.Tensor], completion_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """([P, D], [G, T, D]): the last hidden states of one prompt and of its completions.

    Args:
        prompt: the processor's output for one row, without padding.
        completion_ids: [G, T].
    """
    body.rope_deltas = None
    first = body(**prompt, use_cache=True)
    num_rows, num_tokens = completion_ids.shape
    num_prompt = prompt["input_ids"].shape[1]
    start = num_prompt + int(body.rope_deltas)
    first.past_key_values.batch_repeat_interleave(num_rows)
    positions = torch.arange(start, start + num_tokens)
    rows = body(
        input_ids=completion_ids,
        position_ids=positions.expand(3, num_rows, num_tokens),
        past_key_values=first.past_key_values,
        attention_mask=torch.ones(num_rows, num_prompt + num_tokens, dtype=torch.long),
    )
    body.rope_deltas = None
    return first.last_hidden_state[0], rows.last_hidden_state


def trainer_class(trained: bool) -> type:
    """A `GRPOTrainer` that forwards a prompt once; `trained`: in passes with gradients, too."""
    from trl import GRPOTrainer

    class PromptOnce(GRPOTrainer):
        _checked: set[bool] = set()

        def _get_per_token_logps_and_entropies(
            self,
            model: Any,
            input_ids: torch.Tensor,
            attention_mask: torch.Tensor,
            logits_to_keep: int,
            batch_size: int | None = None,
            compute_entropy: bool = False,
            compute_aux_loss: bool = False,
            **pictures: Any,
        ) -> Any:
            with_gradient = torch.is_grad_enabled()
            plain = super()._get_per_token_logps_and_entropies
            arguments = (model, input_ids, attention_mask, logits_to_keep, batch_size)
            if with_gradient and not trained:
                return plain(*arguments, compute_entropy, compute_aux_loss, **pictures)
            base = self.accelerator.unwrap_model(model).get_base_model()
            rows = (input_ids, attention_mask, logits_to_keep)
            logprobs, entropies = _logprobs(base, *rows, compute_entropy, pictures)
            if with_gradient not in self._checked:
                self._checked.add(with_gradient)
                mask = attention_mask[:, -logits_to_keep:].bool()
                expected, _, _ = plain(*arguments, False, False, **pictures)
                assert_equal(logprobs[mask], expected[mask])
                if with_gradient:
                    weights = [weight for weight in base.parameters() if weight.requires_grad]
                    grads = [
                        torch.autograd.grad(x[mask].sum(), weights, retain_graph=True)
                        for x in (logprobs, expected)
                    ]
                    for mine, theirs in zip(*grads, strict=True):
                        assert_equal(mine, theirs, scale=float(theirs.abs().max()))
            return logprobs, entropies, None

    return PromptOnce


def _logprobs(
    base: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    num_tokens: int,
    with_entropies: bool,
    pictures: Mapping[str, Any],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """([rows, T] log-probs, [rows, T] entropies or None), both in nats, at temperature 1. TRL
    shuffles the rows of an iteration, so they may have several prompts; each has its picture."""
    num_prompt = input_ids.shape[1] - num_tokens
    assert attention_mask[:, :num_prompt].all(), "prompts have different lengths"
    grids = pictures["image_grid_thw"]
    patches = pictures["pixel_values"].split(grids.prod(-1).tolist())
    rows_of: dict[bytes, list[int]] = {}
    for row, ids in enumerate(input_ids[:, :num_prompt]):
        rows_of.setdefault(ids.numpy().tobytes(), []).append(row)
    order: list[int] = []
    hidden = []
    for rows in rows_of.values():
        one = rows[:1]
        assert all(torch.equal(patches[row], patches[one[0]]) for row in rows)
        prompt = {
            "input_ids": input_ids[one, :num_prompt],
            "attention_mask": attention_mask[one, :num_prompt],
            "mm_token_type_ids": pictures["mm_token_type_ids"][one, :num_prompt],
            "pixel_values": patches[one[0]],
            "image_grid_thw": grids[one],
        }
        of_prompt, of_rows = prompt_once(base.model, prompt, input_ids[rows, num_prompt:])
        last = of_prompt[-1:].expand(len(rows), 1, -1)
        hidden.append(torch.cat([last, of_rows[:, :-1]], dim=1))
        order += rows
    logits = base.lm_head(torch.cat(hidden)[torch.tensor(order).argsort()]).float()
    log_softmax = logits.log_softmax(-1)
    logprobs = log_softmax.gather(-1, input_ids[:, num_prompt:, None]).squeeze(-1)
    if not with_entropies:
        return logprobs, None
    with torch.no_grad():
        return logprobs, -(log_softmax.exp() * log_softmax).sum(-1)


def assert_equal(ours: torch.Tensor, theirs: torch.Tensor, scale: float = 1.0) -> None:
    """Asserts equality up to `EQUAL` times the larger of `scale` and 1."""
    worst = float((ours - theirs).detach().abs().max())
    assert worst <= EQUAL * max(1.0, scale), f"differs by {worst} from plain TRL, of scale {scale}"
