"""What a policy's passes cost, in closed formulas; the device's clock, rate and peak memory."""

from __future__ import annotations

import resource
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

# ---- flops ---------------------------------------------------------------------------------------
# Closed-form FLOPs of a language model's passes (gated MLPs, grouped-query attention).

Recompute = bool | Literal["mlp"]
"""`optimizer.gradient_checkpointing`: recompute nothing, whole layers or the MLPs."""
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""A layer's matrices in the order of the forward."""
STAGE_ENDS = (3, 4, 6, 7)
"""Number of matrices up to the end of each stage (matrices with the same input); attention comes
after the first stage."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a decoder-only transformer's layers."""

    num_layers: int
    width: int
    mlp_width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @staticmethod
    def sizes(text: Mapping[str, Any]) -> dict[str, int]:
        """The fields of this class, read from transformers' text config."""
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
        """(input features, output features) of one of `MATRICES`."""
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
    def cached_values_per_token(self) -> int:
        """Values per token in the key-value cache."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class LanguageModel(ModelShape):
    """The sizes that determine the cost of a pass. A multiply-add is two FLOPs; a pair is one
    query that attends to one key. Norms, activations and rotary embeddings are left out: they are
    below 1% at real sizes."""

    vocabulary: int
    lora_rank: int = 0
    """0: full fine-tuning."""
    lora_targets: tuple[str, ...] = ()
    """Names of the adapted matrices."""

    @classmethod
    def of(cls, config: Any, lora: Any = None) -> LanguageModel:
        """From transformers' text config and a policy's `lora` section (None: full fine-tuning)."""
        return cls(
            **cls.sizes(config.to_dict()),
            vocabulary=config.vocab_size,
            lora_rank=lora.r if lora else 0,
            lora_targets=tuple(lora.target_modules) if lora else (),
        )

    def forward_flops(self, num_tokens: int, num_pairs: int) -> float:
        """FLOPs of all layers, without the head."""
        per_layer = sum(map(self._matrix_flops, MATRICES))
        return self.num_layers * (per_layer * num_tokens + self._attention_flops(num_pairs))

    def backward_flops(self, num_tokens: int, num_pairs: int) -> float:
        """FLOPs of all layers, without the head and without recomputation. Each matrix needs
        the gradients of its input and, if trained, of its weights; attention has five products (two
        in the forward). In a LoRA's first layer nothing before the first adapters needs a gradient,
        nor do their inputs (unless the vision tower is trained, too)."""
        adapted = {*self.lora_targets} if self.lora_rank else set()
        forward = sum(map(self._matrix_flops, MATRICES))
        frozen = sum(map(replace(self, lora_rank=0)._matrix_flops, MATRICES)) if adapted else 0.0
        attention = 2.5 * self._attention_flops(num_pairs)
        num_spared = next((end for end in STAGE_ENDS if adapted & {*MATRICES[:end]}), 0)
        spared = sum(
            2.0 * values_in * (values_out + self.lora_rank * (name in adapted))
            for name in MATRICES[:num_spared]
            for values_in, values_out in [self.shape(name)]
        )
        layers = self.num_layers * ((2 * forward - frozen) * num_tokens + attention)
        return layers - spared * num_tokens - attention * (num_spared > STAGE_ENDS[0])

    def head_flops(self, num_tokens: int) -> float:
        """FLOPs of the logits of `num_tokens` tokens."""
        return 2.0 * self.width * self.vocabulary * num_tokens

    def _matrix_flops(self, name: str) -> float:
        """FLOPs of one token's forward through a matrix and its adapter; the gradient of the
        input takes as many, and so do those of the weights, each of what is trained."""
        values_in, values_out = self.shape(name)
        adapter = self.lora_rank * (values_in + values_out) * (name in self.lora_targets)
        return 2.0 * (values_in * values_out + adapter)

    def _attention_flops(self, num_pairs: int) -> float:
        """FLOPs of one layer's attention scores and weighted values."""
        return 4.0 * self.num_heads * self.head_dim * num_pairs


def prefix_tree_pairs(prompt_len: int, completion_lens: Sequence[int]) -> int:
    """(query, key) pairs of a group: a completion attends to the prompt and to itself, causally."""
    within = sum(length * (length + 1) // 2 for length in completion_lens)
    return prompt_len * (prompt_len + 1) // 2 + prompt_len * sum(completion_lens) + within


# ---- device --------------------------------------------------------------------------------------
# Measures time and peak memory on a device, and how fast it multiplies matrices.


@cache
def measure_flops_per_s(device: str, dtype: str) -> float:
    """Operations per second of a large matrix product in `dtype` ('bfloat16', ...); a multiply-add
    counts as two. Takes about a second, once per process.

    Raises torch.OutOfMemoryError on a full device, so call it before models are loaded.
    """
    import torch
    from torch.utils.benchmark import Timer

    side = 8192 if device.startswith("cuda") else 512
    # Random numbers, since zeros multiply faster on a GPU; the run's own generator is not touched.
    generator = torch.Generator(device).manual_seed(0)
    matrix = torch.randn(side, side, device=device, generator=generator)
    used = {"torch": torch, "matrix": matrix.to(getattr(torch, dtype))}
    threads = torch.get_num_threads()
    timer = Timer("torch.mm(matrix, matrix)", globals=used, num_threads=threads)
    seconds = min(timer.blocked_autorange(min_run_time=0.1).times)
    del matrix, used, timer
    torch.cuda.empty_cache()  # nothing without a GPU
    return 2 * side**3 / seconds


def time_mark(device: str) -> float | torch.cuda.Event:
    """A moment: on a CUDA device that in which it finishes the work that is queued on the current
    stream by now, elsewhere this one, in seconds. Waits for nothing."""
    if not device.startswith("cuda"):
        return time.perf_counter()
    import torch

    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(start: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    """Seconds from one mark to a later one of the same device; waits until `end` has passed."""
    if isinstance(start, float) or isinstance(end, float):
        assert isinstance(start, float) and isinstance(end, float), "marks of different devices"
        return end - start
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def take_peak_memory_gb(device: str) -> float:
    """Peak memory of this process, GB (1e9 bytes): on a CUDA device torch's allocations since the
    last call, elsewhere the resident main memory since the process started."""
    if device.startswith("cuda"):
        import torch

        peak_gb = torch.cuda.max_memory_allocated(device) / 1e9
        torch.cuda.reset_peak_memory_stats(device)
        return peak_gb
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
