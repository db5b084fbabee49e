"""The fast sampler: vLLM in the trainer's process, on the trainer's device.

What: one engine per rank, started once, asleep while others use the device; adapters by tensor,
full weights by iterator; per-request seeds and the sampler's own (processed) log-probs; pictures
written as tokens held to their grid (`_vllm_grammar.py`). What not: tensor parallelism (each rank
samples its own prompts), a server. Built by `build.py`, after the process group (an engine that
finds none makes its own) and on every rank.

Axes: `_P` prompts, `_G` completions in a group.
"""

from __future__ import annotations

import atexit
import logging
import os
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from rl.config import Section
from rl.engines import _vllm_start, _vllm_weights
from rl.system.wheels import mend_mismatched_wheels
from rl.types import Completion, PolicyWeights, Prompt, SamplingParams

if TYPE_CHECKING:
    from rl.system.dist import Dist

ENVIRONMENT = {
    # In process: weights are handed over as tensors, and a policy and its sampler share a device.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
"""Set before the first `import vllm`, where the user has not set them."""

BANNED_BIAS = -1e9
"""Added to a banned id's logit: exp of it is exactly 0 in float32, as in the trainer's softmax."""

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Slot sizes vLLM offers."""


class Config(Section):
    """The engine section."""

    type: str
    """'vllm'."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.35
    """Share of the GPU's memory for weights and key-value cache while awake."""
    kv_cache_memory_mb: Annotated[int, Field(ge=1)] | None = None
    """Key-value cache, MiB, instead of that share; null on a CPU means 256."""
    max_model_len: Annotated[int, Field(ge=1)] | None = None
    """Longest prompt + completion, tokens; null = policy.max_prompt_tokens +
    sampling.max_completion_tokens."""
    max_num_seqs: Annotated[int, Field(ge=1)] = 128
    """Completions decoded at the same time."""
    enforce_eager: bool = False
    """True skips compilation and CUDA graphs; a CPU is always eager."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of the sampler's weights; auto = policy.dtype."""
    sleep_level: Literal[0, 1] = 1
    """0: keeps the device's memory while others work; 1: weights to host memory, cache freed (CUDA
    only). vLLM's level 2, which throws the base away, is not offered: it corrupts VLMs."""
    tensor_parallel_size: Literal[1] = 1
    """Every rank is a sampler of its own; more is not supported yet."""


def build(config: Config, policy: Any, dist: Dist) -> VllmEngine:
    """Start the engine on the policy's base weights; takes seconds, minutes for a large model.

    `policy` brings `sampler_folder()`, `dtype`, `lora_rank`, `adapts_vision_tower`,
    `image_pixel_bounds` (None: it reads ids only), `max_prompt_tokens`, `max_completion_tokens`,
    `image_vocabulary`, and its stop and banned ids.
    """
    return VllmEngine(config, policy, dist)


class VllmEngine:
    """See `rl.contracts.Engine`."""

    def __init__(self, config: Config, policy: Any, dist: Dist) -> None:
        self._config = config
        self._dist = dist
        self._on_cuda = dist.device.startswith("cuda")
        self._stop_ids = list(policy.stop_token_ids)
        self._bans = dict.fromkeys(policy.banned_token_ids, BANNED_BIAS)
        self._vocabulary = policy.image_vocabulary
        self._lora = policy.lora_rank is not None
        self._failed = False
        self._fingerprint: str | None = None
        self._expected_hash = ""
        self._llm = self._start(policy)

    def _start(self, policy: Any) -> Any:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        mend_mismatched_wheels()
        if not self._on_cuda:
            # Log-probs run through a compiled function even in eager mode, which would need a C++
            # compiler on the box.
            import torch._dynamo

            torch._dynamo.config.disable = True
        if self._dist.world_size > 1 and not self._on_cuda:
            # Registered before vLLM's own handlers, it runs after them.
            atexit.register(_vllm_start.mute_teardown)
        folder = policy.sampler_folder()
        # Some of it warns before its own configuration says how loud it may be.
        logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])
        with _vllm_start.untouched_globals(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"`torch\.distributed\.reduce_op` is deprecated")
            from vllm import LLM

            _vllm_start.register_in_process(folder)
            arguments = self._arguments(policy)
            if self._vocabulary is not None:
                arguments |= _vllm_start.grammar_arguments(folder, arguments, self._vocabulary)
            return LLM(folder, **arguments)

    def _arguments(self, policy: Any) -> dict[str, Any]:
        config = self._config
        arguments: dict[str, Any] = {
            "dtype": policy.dtype if config.dtype == "auto" else config.dtype,
            "seed": 0,
            "max_model_len": config.max_model_len
            or policy.max_prompt_tokens + policy.max_completion_tokens,
            "max_num_seqs": config.max_num_seqs,
            "enforce_eager": config.enforce_eager or not self._on_cuda,
            "gpu_memory_utilization": config.gpu_memory_utilization,
            "generation_config": "vllm",
            "logprobs_mode": "processed_logprobs",
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
        }
        if policy.image_pixel_bounds is None:
            arguments["skip_tokenizer_init"] = True
        else:
            edges = dict(
                zip(("shortest_edge", "longest_edge"), policy.image_pixel_bounds, strict=True)
            )
            arguments["limit_mm_per_prompt"] = {"image": 1, "video": 0}
            arguments["mm_processor_kwargs"] = {"size": edges}
        cache_mb = config.kv_cache_memory_mb or (None if self._on_cuda else 256)
        if cache_mb is not None:
            arguments["kv_cache_memory_bytes"] = cache_mb << 20
        if not self._on_cuda:
            # A seeded request whose prompt is cut in two rewinds its generator, which a CPU's
            # cannot do: the engine would die as soon as an iteration's prompts fill a step.
            arguments["enable_chunked_prefill"] = False
            # A group shares whole cache blocks of its prompt only. The CPU's default of 128 tokens
            # is longer than a tiny prompt; 32 is the smallest that its attention takes.
            arguments["block_size"] = 32
        if self._on_cuda and config.sleep_level == 1:
            arguments["enable_sleep_mode"] = True
        if self._dist.world_size > 1:
            # Reads torchrun's LOCAL_RANK; the default executor would put every rank on device 0.
            arguments["distributed_executor_backend"] = "external_launcher"
        if self._lora:
            arguments |= {
                "enable_lora": True,
                "max_lora_rank": min(r for r in LORA_RANKS if r >= policy.lora_rank),
                "enable_tower_connector_lora": policy.adapts_vision_tower,
            }
        return arguments

    def generate(
        self, prompts_P: Sequence[Prompt], params: SamplingParams, seeds_P: Sequence[int]
    ) -> list[list[Completion]]:
        """completions_PG. Temperature 0 takes the likeliest token (all G members are then equal).

        Any exception inside the engine is final: vLLM would spin for ever on its next call.
        """
        if self._failed:
            raise RuntimeError("the vLLM engine failed before and cannot be used again")
        if not prompts_P:
            return []
        requests = [_request(prompt) for prompt in prompts_P]
        sampling = [
            self._sampling(prompt, params, seed)
            for prompt, seed in zip(prompts_P, seeds_P, strict=True)
        ]
        import torch

        try:
            # Seeded requests draw from generators of their own, and a sampling step from the
            # global one besides, whose draw nobody uses: the trainer must not notice.
            with torch.random.fork_rng([self._dist.device] if self._on_cuda else []):
                outputs = self._llm.generate(
                    requests, sampling, use_tqdm=False, lora_request=self._lora_request()
                )
        except BaseException:
            self._failed = True
            raise
        return [
            self._group(prompt, output, params)
            for prompt, output in zip(prompts_P, outputs, strict=True)
        ]

    def _sampling(self, prompt: Prompt, params: SamplingParams, seed: int) -> Any:
        from vllm import SamplingParams as VllmSamplingParams

        grid = self._grid(prompt)
        return VllmSamplingParams(
            n=params.num_completions if params.temperature > 0 else 1,
            seed=seed,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            max_tokens=params.max_tokens,
            logprobs=0,
            detokenize=False,
            ignore_eos=True,  # the policy's stop ids are the only ones
            stop_token_ids=self._stop_ids,
            logit_bias=self._bans,
            extra_args={_vllm_start.GRID: grid} if grid else None,
        )

    def _group(self, prompt: Prompt, output: Any, params: SamplingParams) -> list[Completion]:
        if tuple(output.prompt_token_ids) != prompt.token_ids:
            raise RuntimeError(
                f"vLLM read the prompt of sample {prompt.sample.id!r} as "
                f"{len(output.prompt_token_ids)} tokens, the trainer as {len(prompt.token_ids)}: "
                "their image processors differ (preprocessor_config.json)"
            )
        completions_G = [self._completion(prompt, member) for member in output.outputs]
        return completions_G * (params.num_completions // len(completions_G))

    def _completion(self, prompt: Prompt, member: Any) -> Completion:
        from rl.algorithm.image_grammar import forced_tokens

        ids = tuple(member.token_ids)
        logprobs = tuple(
            position[token].logprob for position, token in zip(member.logprobs, ids, strict=True)
        )
        forced = None
        if (grid := self._grid(prompt)) and self._vocabulary:
            forced = forced_tokens(ids, grid, self._vocabulary)
        return Completion(ids, logprobs, "stop" if ids[-1] in self._stop_ids else "length", forced)

    def _grid(self, prompt: Prompt) -> tuple[int, int] | None:
        """(h, w) to which its completions are held; None: they are free."""
        return prompt.grid if self._vocabulary else None

    def _lora_request(self) -> Any:
        if not self._lora or self._fingerprint is None:
            return None
        from vllm.lora.request import LoRARequest

        # The path is never read: the adapter of this number is in the slots already.
        return LoRARequest("policy", _vllm_weights.ADAPTER_ID, "in-memory")

    def sleep(self) -> None:
        """Free the device (CUDA, sleep_level 1) and drop every cache that depends on weights."""
        self._drop_caches()
        if self._on_cuda and self._config.sleep_level == 1:
            self._llm.sleep(level=1)

    def wake(self) -> None:
        """Undo `sleep`; the weights are those from before it."""
        if self._on_cuda and self._config.sleep_level == 1:
            self._llm.wake_up()

    def load_weights(self, weights: PolicyWeights) -> None:
        """Take the trainer's weights; the engine must be awake. The base is never written to when
        `weights` is an adapter."""
        if (weights.kind == "lora") != self._lora:
            raise ValueError(f"this engine was started for another kind than {weights.kind!r}")
        if weights.kind == "lora":
            clones = {name: tensor.clone() for name, tensor in weights.tensors.items()}
            [self._expected_hash] = self._llm.collective_rpc(
                _vllm_weights.put_lora, args=(clones, weights.lora_config)
            )
        else:
            self._llm.collective_rpc(
                "reload_weights", kwargs={"weights_iterator": iter(weights.tensors.items())}
            )
        self._fingerprint = weights.fingerprint
        self._drop_caches()

    def held_fingerprint(self) -> str | None:
        """The loaded weights' fingerprint when the worker's LoRA slots hold them bit for bit (B
        scaled, both in the engine's dtype), else the hash of what they hold. None before the first
        load, and for full weights, which vLLM repacks beyond recognition."""
        if self._fingerprint is None or not self._lora:
            return None
        [held] = self._llm.collective_rpc(_vllm_weights.held_lora)
        return self._fingerprint if held == self._expected_hash else held

    def close(self) -> None:
        """Stop the engine. With several ranks it stays until the process ends: stopping it would
        take the trainer's process group down with it."""
        core = self._llm.llm_engine.engine_core
        if self._dist.world_size > 1:
            core._finalizer.detach()
            return
        core.shutdown()
        del self._llm

    def _drop_caches(self) -> None:
        self._llm.reset_prefix_cache()
        self._llm.reset_mm_cache()
        self._llm.llm_engine.reset_encoder_cache()


def _request(prompt: Prompt) -> dict[str, Any]:
    """ONE placeholder per picture: expanded ids would silently be expanded again."""
    request: dict[str, Any] = {"prompt_token_ids": list(prompt.engine_token_ids)}
    if prompt.images:
        request["multi_modal_data"] = {"image": list(prompt.images)}
    return request
