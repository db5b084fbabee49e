"""Closed formulas for the cost of a language model's passes (gated MLPs, grouped keys and values).

A multiply-add is two operations. A pair is one query that attends to one key. Norms, activations
and rotary embeddings are left out: below a hundredth at real sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Recompute = bool | Literal["mlp"]
"""As `optimizer.gradient_checkpointing`: nothing, whole layers, or the insides of the MLPs."""
STAGES = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
"""A layer's matrices in the order in which a token passes them; attention lies behind the first."""


class Work(NamedTuple):
    """The cost of a computation."""

    flops: float
    bytes_moved: float
    """Between memory and the device."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder's layers."""

    num_layers: int
    width: int
    mlp_width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @staticmethod
    def sizes(text: Mapping[str, Any]) -> dict[str, int]:
        """These fields, out of transformers' text config."""
        num_heads = text["num_attention_heads"]
        return {
            "num_layers": text["num_hidden_layers"],
            "width": text["hidden_size"],
            "mlp_width": text["intermediate_size"],
            "num_heads": num_heads,
            "num_kv_heads": text.get("num_key_value_heads", num_heads),
            "head_dim": text.get("head_dim") or text["hidden_size"] // num_heads,
        }

    def shape(self, matrix: str) -> tuple[int, int]:
        """(values in, values out) of one of `STAGES`' matrices."""
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "q_proj": (self.width, queries),
            "k_proj": (self.width, keys),
            "v_proj": (self.width, keys),
            "o_proj": (queries, self.width),
            "gate_proj": (self.width, self.mlp_width),
            "up_proj": (self.width, self.mlp_width),
            "down_proj": (self.mlp_width, self.width),
        }[matrix]

    @property
    def num_cached(self) -> int:
        """Values that the cache of keys and values holds per token."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class LanguageModel(ModelShape):
    """What decides the cost of a pass."""

    vocabulary: int
    lora_rank: int = 0
    """0: trained in full."""
    lora_targets: tuple[str, ...] = ()
    """Names of the adapted matrices."""
    recompute: Recompute = False
    """What the backward does again instead of keeping it."""

    @classmethod
    def of(cls, config: Any, lora: Any = None, recompute: Recompute = False) -> LanguageModel:
        """From transformers' text config and a policy's `lora` section (None: full fine-tuning)."""
        return cls(
            **cls.sizes(config.to_dict()),
            vocabulary=config.vocab_size,
            lora_rank=lora.r if lora else 0,
            lora_targets=tuple(lora.target_modules) if lora else (),
            recompute=recompute,
        )

    def forward_flops(self, num_tokens: int, num_pairs: int) -> float:
        """Of all layers, without the head."""
        per_layer = sum(self._matrix_flops(name) for stage in STAGES for name in stage)
        return self.num_layers * (per_layer * num_tokens + self._attention_flops(num_pairs))

    def backward_flops(self, num_tokens: int, num_pairs: int) -> float:
        """Of all layers, without the head, `recompute` included.

        Every matrix hands the gradient on to its input, trained ones also take their own.
        Attention's backward is five products for the forward's two, as its kernels do it. Before
        the first trained matrix nothing is handed on: the adapters of the first layer's `q_proj`
        read the embeddings, which a LoRA does not train. (Where whole layers are recomputed
        transformers asks for the embeddings' gradient all the same.)
        """
        asked = self.lora_rank == 0 or self.recompute is True
        first = self._layer_backward_flops(num_tokens, num_pairs, asked)
        others = self._layer_backward_flops(num_tokens, num_pairs, True)
        recomputed = self._recomputed_flops(num_tokens, num_pairs)
        return first + (self.num_layers - 1) * others + self.num_layers * recomputed

    def head_flops(self, num_tokens: int, num_ids: int | None = None) -> float:
        """Logits of `num_ids` (default: the whole vocabulary) behind each token."""
        return 2.0 * self.width * (num_ids or self.vocabulary) * num_tokens

    @property
    def num_weights(self) -> int:
        """Of the matrices that a token passes, head included, adapters and embedding not."""
        sides = (self.shape(name) for stage in STAGES for name in stage)
        return self.num_layers * sum(a * b for a, b in sides) + self.width * self.vocabulary

    def _layer_backward_flops(self, num_tokens: int, num_pairs: int, reached: bool) -> float:
        """`reached`: whether the layer's input asks for a gradient."""
        per_token = attention = 0.0
        for stage in STAGES:
            for name in stage:
                per_token += self._own_gradient_flops(name) + self._matrix_flops(name) * reached
                if name in self.lora_targets and not reached:
                    per_token += 2.0 * self.lora_rank * self.shape(name)[1]
            reached = reached or any(name in self.lora_targets for name in stage)
            if stage == STAGES[0]:
                attention = 2.5 * self._attention_flops(num_pairs) * reached
        return per_token * num_tokens + attention

    def _matrix_flops(self, name: str) -> float:
        """Of one token's forward through a matrix and its adapter; as many hand a gradient on."""
        values_in, values_out = self.shape(name)
        adapter = self.lora_rank * (values_in + values_out) * (name in self.lora_targets)
        return 2.0 * (values_in * values_out + adapter)

    def _own_gradient_flops(self, name: str) -> float:
        values_in, values_out = self.shape(name)
        if self.lora_rank == 0:
            return 2.0 * values_in * values_out
        return 2.0 * self.lora_rank * (values_in + values_out) * (name in self.lora_targets)

    def _attention_flops(self, num_pairs: int) -> float:
        """One layer's scores and weighted values."""
        return 4.0 * self.num_heads * self.head_dim * num_pairs

    def _recomputed_flops(self, num_tokens: int, num_pairs: int) -> float:
        """One layer's. A checkpoint stops when it has what was not kept: the last product's result
        is never needed."""
        if not self.recompute:
            return 0.0
        whole = self.recompute is True
        again = [name for stage in (STAGES if whole else STAGES[2:]) for name in stage]
        attention = self._attention_flops(num_pairs) if whole else 0.0
        values_in, values_out = self.shape("down_proj")
        last = (self.lora_rank if "down_proj" in self.lora_targets else values_in) * values_out
        return num_tokens * (sum(map(self._matrix_flops, again)) - 2.0 * last) + attention


def prefix_tree_pairs(prompt_len: int, completion_lens: Sequence[int]) -> int:
    """(query, key) pairs of a group: the prompt causally, each completion over it and itself."""
    own = sum(length * (length + 1) // 2 for length in completion_lens)
    return prompt_len * (prompt_len + 1) // 2 + prompt_len * sum(completion_lens) + own


def sampling_work(
    model: LanguageModel,
    prompt_lens_P: Sequence[int],
    completion_lens_PG: Sequence[Sequence[int]],
    bytes_per_value: int,
) -> Work:
    """The least that sampling these completions together takes, without a vision tower.

    Every prompt runs once; a completion's last token is drawn, never fed. A step reads every weight
    once, the keys and values of a prompt once for its group, and of what each member wrote.
    """
    weights = model.num_weights * bytes_per_value
    cached = model.num_cached * bytes_per_value
    flops = 0.0
    num_steps = max((max(lens_G, default=0) for lens_G in completion_lens_PG), default=0) - 1
    bytes_moved = weights * (1 + max(0, num_steps))
    for prompt_len, lens_G in zip(prompt_lens_P, completion_lens_PG, strict=True):
        flops += model.forward_flops(prompt_len, prefix_tree_pairs(prompt_len, ()))
        flops += model.head_flops(1)
        fed_G = [max(0, length - 1) for length in lens_G]
        written = sum(fed * (fed + 1) // 2 for fed in fed_G)
        pairs = prompt_len * sum(fed_G) + written
        flops += model.forward_flops(sum(fed_G), pairs) + model.head_flops(sum(fed_G))
        bytes_moved += cached * (prompt_len * max(fed_G, default=0) + written)
    return Work(flops, bytes_moved)
