"""The slow sampler: the trainer's own module, token by token. The oracle for the fast one.

What: explicit sampling, one `torch.Generator` per completion, log-probs of the very distribution
the token was drawn from. What not: speed (one prompt at a time), a copy of the weights (it reads
the policy's, so there is nothing to sync), ZeRO-3 (its module holds no whole weights). Built by
`build.py`; tests hold the vLLM engine against it.

Axes: `_P` prompts, `_G` completions in a group, `_V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from rl.config import Section
from rl.types import Completion, PolicyWeights, Prompt, SamplingParams

if TYPE_CHECKING:
    import torch

    from rl.system.dist import Dist


SAMPLES_WITH_TRAINER = True
"""It reads the trainer's weights where they lie: refused with ZeRO-3 before the run starts."""


class Config(Section):
    """The engine section."""

    type: str
    """'transformers'."""


def build(config: Config, policy: Any, dist: Dist) -> TransformersEngine:
    """`policy` brings `decoder(prompt, num_rows)`, its stop and its banned ids."""
    return TransformersEngine(policy)


class TransformersEngine:
    """See `rl.types.Engine`."""

    def __init__(self, policy: Any) -> None:
        self._policy = policy
        self._fingerprint: str | None = None

    def generate(
        self, prompts_P: Sequence[Prompt], params: SamplingParams, seeds_P: Sequence[int]
    ) -> list[list[Completion]]:
        """completions_PG. Temperature 0 takes the likeliest token; its log-probs are then those at
        temperature 1."""
        if any(hasattr(parameter, "ds_id") for parameter in self._policy.module.parameters()):
            raise ValueError(
                "engine 'transformers' samples with the trainer's own weights, which ZeRO-3 "
                "shards: use engine 'vllm', or optimizer.zero_stage <= 2"
            )
        module = self._policy.module
        was_training = module.training
        module.eval()
        try:
            return [
                self._generate_group(prompt, params, seed)
                for prompt, seed in zip(prompts_P, seeds_P, strict=True)
            ]
        finally:
            module.train(was_training)

    def _generate_group(
        self, prompt: Prompt, params: SamplingParams, seed: int
    ) -> list[Completion]:
        import torch

        num_rows = params.num_completions
        generators = [torch.Generator().manual_seed(seed + g) for g in range(num_rows)]
        decoder = self._policy.decoder(prompt, num_rows)
        tokens: list[list[int]] = [[] for _ in range(num_rows)]
        logprobs: list[list[float]] = [[] for _ in range(num_rows)]
        open_rows = set(range(num_rows))
        last: list[int] | None = None
        for _ in range(params.max_tokens):
            logprobs_GV = self._distribution(decoder.step(last), params)
            # A finished row goes on being decoded, unread, so that its neighbours' numbers do not
            # depend on when it stopped.
            last = [
                _draw(row_V, params.temperature, generator)
                for row_V, generator in zip(logprobs_GV, generators, strict=True)
            ]
            for g in sorted(open_rows):
                tokens[g].append(last[g])
                logprobs[g].append(float(logprobs_GV[g, last[g]]))
                if last[g] in self._policy.stop_token_ids:
                    open_rows.remove(g)
            if not open_rows:
                break
        return [
            Completion(tuple(tokens[g]), tuple(logprobs[g]), self._finish(tokens[g]))
            for g in range(num_rows)
        ]

    def _finish(self, tokens: list[int]) -> Literal["stop", "length"]:
        return "stop" if tokens[-1] in self._policy.stop_token_ids else "length"

    def _distribution(self, logits_GV: torch.Tensor, params: SamplingParams) -> torch.Tensor:
        """[G, V] float32 log-probs: banned ids out, temperature, then top-k, then top-p."""
        import torch

        banned = torch.tensor(self._policy.banned_token_ids, dtype=torch.int64)
        logits = logits_GV.cpu().float() / (params.temperature or 1.0)
        logits = logits.index_fill(-1, banned, float("-inf"))
        if params.top_k > 0:
            kth = logits.topk(min(params.top_k, logits.shape[-1]), dim=-1).values[:, -1:]
            logits = logits.masked_fill(logits < kth, float("-inf"))
        if params.top_p < 1:
            descending, order = logits.sort(dim=-1, descending=True)
            probs = descending.softmax(-1)
            # A token stays while the mass before it is below top_p: the likeliest always does.
            outside = probs.cumsum(-1) - probs >= params.top_p
            logits = logits.masked_fill(outside.scatter(-1, order, outside), float("-inf"))
        return logits.log_softmax(-1)

    def sleep(self) -> None:
        """Nothing is held."""

    def wake(self) -> None:
        """Nothing was let go."""

    def load_weights(self, weights: PolicyWeights) -> None:
        """The module is the policy's own: it already holds them."""
        self._fingerprint = weights.fingerprint

    def held_fingerprint(self) -> str | None:
        """Of the last weights announced, which are the policy's own; None before the first."""
        return self._fingerprint

    def close(self) -> None:
        """Nothing is held."""


def _draw(logprobs_V: torch.Tensor, temperature: float, generator: torch.Generator) -> int:
    import torch

    if temperature == 0:
        return int(logprobs_V.argmax())
    return int(torch.multinomial(logprobs_V.exp(), 1, generator=generator))
