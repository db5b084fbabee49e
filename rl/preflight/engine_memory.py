"""What an engine with weights of its own takes of a GPU, and the least it starts with.

What: `InferenceEngine`, arithmetic for vLLM as `engines/vllm/plug.py` starts it. What not: the
others on that GPU (`memory_plan.py`, which counts this among them), which share is right
(`memory_remedies.py`).

GB is 1e9 bytes throughout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rl.api.engine import Residency

ENGINE_WORKSPACE_GB = 1.5
"""What vLLM keeps of its share for CUDA graphs and buffers."""
ENGINE_STEP_TOKENS = 16384
"""Most that vLLM computes at once on a GPU of 70 GiB or more; half of it on a smaller one."""
LARGE_GPU_GB = 70 * 2**30 / 1e9
CACHE_BLOCK = 32
"""Tokens by which vLLM hands out its cache: 16 on CUDA, 32 on a CPU."""


@dataclass(frozen=True)
class InferenceEngine:
    """An engine that holds a copy of the policy's weights."""

    share: float
    """Of the GPU: what it claims while awake."""
    cache_gb: float | None
    """A key-value cache that is stated instead of that share."""
    weights_gb: float
    """Its copy's."""
    kv_bytes: int
    """Of one token in its cache."""
    step_bytes: int
    """Of one token while it is computed."""
    longest_tokens: int
    """Of prompt + completion; it does not start with room for fewer."""
    max_num_seqs: int
    residency: Residency
    """Whether it keeps its memory while others work; auto: where the GPU holds it all."""

    @property
    def least_cache_gb(self) -> float:
        """Cache of one completion as long as it can be, in whole blocks."""
        return math.ceil(self.longest_tokens / CACHE_BLOCK) * CACHE_BLOCK * self.kv_bytes / 1e9

    def workspace_gb(self, gpu_gb: float) -> float:
        """What it keeps beside weights and cache: it tries its largest step before it begins."""
        largest = ENGINE_STEP_TOKENS if gpu_gb >= LARGE_GPU_GB else ENGINE_STEP_TOKENS // 2
        step_tokens = min(largest, self.max_num_seqs * self.longest_tokens)
        return ENGINE_WORKSPACE_GB + step_tokens * self.step_bytes / 1e9

    def least_gb(self, gpu_gb: float) -> float:
        """The least it starts with."""
        return self.weights_gb + self.workspace_gb(gpu_gb) + self.least_cache_gb

    def claimed_gb(self, gpu_gb: float) -> float:
        """Its memory while awake."""
        if self.cache_gb is None:
            return self.share * gpu_gb
        return self.weights_gb + self.workspace_gb(gpu_gb) + self.cache_gb

    def starves(self, gpu_gb: float) -> bool:
        """Whether it cannot start: no room for its weights and one completion."""
        return self.claimed_gb(gpu_gb) < self.least_gb(gpu_gb)
