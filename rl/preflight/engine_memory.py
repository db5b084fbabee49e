"""What an engine with weights of its own takes of a GPU, and the least it starts with.

Arithmetic for vLLM as `engines/vllm/plug.py` starts it; its blocks and completions at once are
vLLM's own start-up figures (tested against vLLM's functions). GB is 1e9 bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from rl.api.engine import Residency

ENGINE_STEP_TOKENS = 16384
"""Most that vLLM computes at once on a GPU of 70 GiB or more; half of it on a smaller one."""
LARGE_GPU_GB = 70 * 2**30 / 1e9
CACHE_BLOCK = 16
"""Tokens by which vLLM hands out its cache on CUDA."""


SEGMENT_BYTES = 2**21
"""Of which a large tensor's GPU memory is a multiple."""


def pinned_bytes(num_bytes: float) -> int:
    """Host memory of a sleeping tensor: vLLM copies each into pinned memory of its own, and torch
    hands that out in powers of two."""
    in_segments = -(-int(num_bytes) // SEGMENT_BYTES) * SEGMENT_BYTES
    return 1 << (in_segments - 1).bit_length()


@dataclass(frozen=True)
class InferenceEngine:
    """An engine that holds a copy of the policy's weights."""

    share: float | None
    """Of the GPU: what it claims while awake; None: what `with_cache` finds."""
    cache_gb: float | None
    """A key-value cache that is stated instead of that share."""
    own_gb: float
    """What it keeps for itself, asleep too (CUDA graphs, buffers); assumed."""
    weights_gb: float
    """Its copy's."""
    asleep_gb: float
    """Host memory that they take while it sleeps."""
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
    def completion_blocks(self) -> int:
        """Cache blocks of one completion as long as it can be, prompt included."""
        return math.ceil(self.longest_tokens / CACHE_BLOCK)

    @property
    def block_gb(self) -> float:
        """One block of the cache, all layers."""
        return CACHE_BLOCK * self.kv_bytes / 1e9

    def cache_of_gb(self, num_completions: int) -> float:
        """Cache of that many completions as long as they can be, no prompt shared, in whole blocks;
        vLLM keeps one for itself."""
        return (num_completions * self.completion_blocks + 1) * self.block_gb

    def workspace_gb(self, gpu_gb: float) -> float:
        """What it keeps beside weights and cache: it tries its largest step before it begins."""
        largest = ENGINE_STEP_TOKENS if gpu_gb >= LARGE_GPU_GB else ENGINE_STEP_TOKENS // 2
        step_tokens = min(largest, self.max_num_seqs * self.longest_tokens)
        return self.own_gb + step_tokens * self.step_bytes / 1e9

    def least_gb(self, gpu_gb: float) -> float:
        """The least it starts with."""
        return self.weights_gb + self.workspace_gb(gpu_gb) + self.cache_of_gb(1)

    def with_cache(self, num_completions: int, gpu_gb: float, room_gb: float) -> InferenceEngine:
        """With a cache for that many completions, each as long as it can be, or for as many as
        there is room for, at least one; as it is where its section states share or cache."""
        if self.share is not None or self.cache_gb is not None:
            return self
        left_gb = room_gb - self.weights_gb - self.workspace_gb(gpu_gb) - self.block_gb
        room_for = int(left_gb / (self.completion_blocks * self.block_gb))
        at_once = max(1, min(num_completions, self.max_num_seqs, room_for))
        return replace(self, cache_gb=self.cache_of_gb(at_once))

    def claimed_gb(self, gpu_gb: float) -> float:
        """Its memory while awake."""
        if self.cache_gb is not None:
            return self.weights_gb + self.workspace_gb(gpu_gb) + self.cache_gb
        return self.least_gb(gpu_gb) if self.share is None else self.share * gpu_gb

    def num_blocks(self, gpu_gb: float) -> int:
        """Blocks of its cache; 0 where there is no room for any."""
        cache_gb = self.claimed_gb(gpu_gb) - self.weights_gb - self.workspace_gb(gpu_gb)
        # A stated cache is a whole number of bytes, of which a difference of floats may lose one.
        return max(0, int(round(cache_gb * 1e9) // (CACHE_BLOCK * self.kv_bytes)))

    def at_once(self, gpu_gb: float) -> float:
        """Completions of full length that its cache holds, no prompt shared: what vLLM prints as
        "Maximum concurrency"; it decodes at most `max_num_seqs` of them."""
        return self.num_blocks(gpu_gb) / self.completion_blocks

    def starves(self, gpu_gb: float) -> bool:
        """Whether it cannot start: no room for its weights and one completion."""
        return self.num_blocks(gpu_gb) <= self.completion_blocks
