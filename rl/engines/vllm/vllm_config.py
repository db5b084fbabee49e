"""The keys of `engine: { type: 'vllm' }`, and the names that its files agree on."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rl.api.engine import Residency
from rl.api.plug import PlugConfig
from rl.config.schema import MAX_COUNT, MAX_TOKENS

GRID = "image_grid"
"""Key of a request's (h, w) in `SamplingParams.extra_args`; absent: the request is not held."""
VOCABULARY = "image_vocabulary"
"""Key of the fields of `ImageVocabulary` in the engine's `additional_config`."""


class Config(PlugConfig):
    """The engine section."""

    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | Literal["auto"] = "auto"
    """Share of the GPU's memory for weights and key-value cache while awake. auto: its weights, its
    workspace, and a cache for every completion that its rank samples in an iteration, each as long
    as it may be and with a prompt of its own; where the memory plan has no room for that many, for
    as many as there is, at least one. Read by nothing on a CPU."""
    kv_cache_memory_mb: Annotated[int, Field(ge=1, le=MAX_COUNT)] | None = None
    """Key-value cache, MiB, instead of that share; null on a CPU means 256."""
    max_model_len: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    """Longest prompt + completion, tokens; null = policy.max_prompt_tokens +
    sampling.max_completion_tokens."""
    max_num_seqs: Annotated[int, Field(ge=1, le=100_000)] = 128
    """Completions decoded at the same time."""
    enforce_eager: bool = False
    """True skips compilation and CUDA graphs; a CPU is always eager."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of the engine's weights; auto = policy.dtype."""
    residency: Residency = "auto"
    """Where the engine is while others use the device (CUDA only). resident: it stays; sleep: its
    weights go to host memory and its cache is freed, seconds an iteration for a large model; auto:
    it stays where the memory plan has room. vLLM's deeper sleep, which throws the base away, is not
    offered: it corrupts VLMs."""
    adapter: Literal["served", "merged"] = "served"
    """How a LoRA is sampled with. served: beside the base, exact. merged: summed into the matrices
    it adapts at every sync: a fifth less decoding on a CPU for a sync of 19 ms instead of 2; exact
    in float32, while in bfloat16 the sum loses what is small beside its matrix (mean
    |log-prob difference| to the trainer 0.0024 nats instead of 0.0020). Not under ZeRO-3."""
    tensor_parallel_size: Literal[1] = 1
    """Every rank is an engine of its own; more is not supported yet."""
