"""The fast inference engine: vLLM in the trainer's process, on the trainer's device.

Axes: `_P` prompts, `_G` completions in a group.
"""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import count
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from rl.api.engine import Engine, EngineMemory, EngineSetup, Residency
from rl.api.plugin import PlacedConfig, PluginConfig
from rl.api.policy import Policy, PolicyConfig
from rl.api.types import Completion, ImageVocabulary, PolicyWeights, Prompt, SamplingParams
from rl.config.schema import MAX_TOKENS, RunConfig, vllm_build
from rl.engines.vllm_process import (
    ADAPTER_ID,
    GRID,
    VOCABULARY,
    FullWeights,
    Lora,
    full_difference,
    full_sums,
    lora_difference,
    parameter_difference,
    parameter_sums,
    put_lora,
    register_in_process,
    shut_down,
    untouched_globals,
)
from rl.model_files import fingerprint

if TYPE_CHECKING:
    import torch

ENVIRONMENT = {
    # In process: weights are handed over as tensors, and a policy and its engine share a device.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    # On a GPU, float32 attention runs in Triton, which would multiply in TF32 (10-bit mantissa).
    "TRITON_F32_DEFAULT": "ieee",
}
"""Set before the first `import vllm`, unless the user has set them."""

BANNED_BIAS = -1e9
"""Added to a banned id's logit; its exp is exactly 0 in float32, as in the trainer's softmax."""

OWN_GB, GRAPHS_GB = 1.0, 0.6
"""Assumed. OWN_GB: vLLM's memory besides that of its largest step: buffers, workspaces, NCCL.
GRAPHS_GB: CUDA graphs of one set of batch sizes; an adapter adds a second set."""

CPU_CACHE_BYTES, CPU_SHARE = 256 << 20, 0.01
"""On a CPU: the key-value cache, and the share of the host's memory that must be free."""
BFLOAT16_CAPABILITY = 8.0
"""Compute capability needed (Ampere): `check_if_supports_dtype` in vllm/platforms/cuda.py."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""LoRA ranks for which vLLM has slots."""


class Config(PluginConfig):
    """The engine section."""

    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | Literal["auto"] = "auto"
    """Share of the GPU's memory for weights and KV cache while the engine is awake. auto: its
    weights, its workspace, and a cache for all completions that its rank samples in an iteration,
    each of maximal length and with its own prompt; if the memory plan has no room for all of them,
    for as many as fit, at least one. Ignored on a CPU, where the cache has 256 MiB."""
    max_model_len: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    """Longest prompt + completion, tokens; null = policy.max_prompt_tokens +
    sampling.max_completion_tokens."""
    max_num_seqs: Annotated[int, Field(ge=1, le=100_000)] = 128
    """Completions decoded at the same time."""
    enforce_eager: bool = False
    """True skips compilation and CUDA graphs; a CPU is always eager."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of the engine's weights; auto = policy.dtype."""
    residency: Residency = "auto"
    """Whether the engine keeps its GPU memory while others use the device (CUDA only). resident: it
    does; sleep: it moves its weights to host memory and frees its cache, which takes seconds per
    iteration for a large model; auto: resident if the memory plan has room. vLLM's sleep level 2,
    which discards the base weights, is not offered: it corrupts VLMs."""


class VllmEngine(Engine[Config]):
    """vLLM in the trainer's process and on its device, with the trained weights after every sync.
    Starting it takes seconds, minutes for a large model."""

    def __init__(self, config: Config, setup: EngineSetup) -> None:
        super().__init__(config, setup)
        policy = setup.policy
        reads_features = (
            policy.image_pixel_bounds is not None
            and policy.has_frozen_tower(policy.config)
            and not setup.sharded
        )
        self._setup = setup
        self._on_cuda = setup.device.startswith("cuda")
        needs_sleep = {"auto": not setup.has_room, "sleep": True, "resident": False}
        self._sleeps = self._on_cuda and needs_sleep[config.residency]
        """Whether the engine frees the device while others use it."""
        self._features_of = policy.picture_features if reads_features else None
        """Encodes pictures in the policy's vision tower; None: the engine's own tower does."""
        self._stop_ids = list(policy.stop_token_ids)
        self._bans = dict.fromkeys(policy.banned_token_ids, BANNED_BIAS)
        self._vocabulary = policy.image_vocabulary
        self._has_lora = policy.config.lora is not None
        self._fingerprint: str | None = None
        self._expected: Lora | FullWeights = {}
        """The weights that the worker must hold since the last load."""
        self._reads_back = True
        """Whether every loaded tensor can be read back."""
        self._sleep_sums: Mapping[str, torch.Tensor] | None = None
        """`bit_sums` of the weights before the engine slept; None while it is awake."""
        self._numbers = count()
        self._llm = self._start(policy)
        model_config = self._llm.llm_engine.model_config
        self._dtype = model_config.dtype
        self._image_token_id = getattr(model_config.hf_config, "image_token_id", None)

    @classmethod
    def memory(cls, config: Config) -> EngineMemory:
        share, graphs_gb = config.gpu_memory_utilization, 0 if config.enforce_eager else GRAPHS_GB
        return EngineMemory(
            share=None if share == "auto" else share,
            own_gb=OWN_GB + graphs_gb,
            adapter_gb=graphs_gb,
            dtype=None if config.dtype == "auto" else config.dtype,
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            residency=config.residency,
        )

    @classmethod
    def problems(cls, config: Config, run: RunConfig) -> Iterable[str]:
        rank = (run.policy.get("lora") or {}).get("r", 0)
        if rank > LORA_RANKS[-1]:
            yield f"type: vLLM's ranks end at {LORA_RANKS[-1]}; lower policy.lora.r ({rank})"
        device = str(run.policy.get("device", "auto"))
        if device[5:].strip("0").isdecimal() and run.world_size == 1:
            yield (
                f"type: vLLM runs on the first GPU it sees, and policy.device is {device!r}; start "
                f"with CUDA_VISIBLE_DEVICES={device[5:]} and policy.device=auto"
            )

    @classmethod
    def device_problems(
        cls, config: Config, policy: PlacedConfig, capability: float | None
    ) -> Iterable[str]:
        build, device = vllm_build(), "cpu" if capability is None else "cuda"
        if build not in ("", device) and capability != math.inf:
            lock = "requirements.lock" if device == "cuda" else "requirements-cpu.lock"
            yield (
                f"type: the installed vLLM is built for {build!r}, the policy is on {device!r}; "
                f"use engine.type=transformers, or install {lock} into a new .venv"
            )
        if capability is None:
            return
        dtype = policy.dtype if config.dtype == "auto" else config.dtype
        if dtype == "bfloat16" and capability < BFLOAT16_CAPABILITY:
            yield (
                f"dtype: vLLM's bfloat16 needs a GPU of compute capability {BFLOAT16_CAPABILITY}, "
                f"this one has {capability}; set engine.dtype=float16, or use "
                "engine.type=transformers"
            )
        adapts = isinstance(policy, PolicyConfig) and policy.lora is not None
        if adapts and dtype == "float32":
            remedy = "policy.dtype=bfloat16" if config.dtype == "auto" else "engine.dtype=auto"
            yield (
                "dtype: on a GPU vLLM serves an adapter in 16 bits only, and its dtype is "
                f"float32; set {remedy}, or engine.type=transformers, or run on the CPU "
                "(policy.device=cpu)"
            )

    def _start(self, policy: Policy) -> Any:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        if not self._on_cuda:
            # Even in eager mode log-probs use a compiled function, which needs a C++ compiler.
            from torch import _dynamo

            _dynamo.config.disable = True
        folder = policy.engine_folder()
        # vLLM logs before it has read its own log level.
        logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])
        with untouched_globals(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"`torch\.distributed\.reduce_op` is deprecated")
            import torch
            from vllm import LLM

            self._group_existed = torch.distributed.is_initialized()
            register_in_process(folder)
            arguments = self._arguments(policy)
            if self._vocabulary is not None:
                arguments |= grammar_arguments(folder, arguments, self._vocabulary)
            return LLM(folder, **arguments)

    def _arguments(self, policy: Policy) -> dict[str, Any]:
        config, lora = self.config, policy.config.lora
        arguments: dict[str, Any] = {
            "dtype": policy.config.dtype if config.dtype == "auto" else config.dtype,
            "seed": 0,
            "max_model_len": config.max_model_len
            or policy.config.max_prompt_tokens + policy.setup.max_completion_tokens,
            "max_num_seqs": config.max_num_seqs,
            "enforce_eager": config.enforce_eager or not self._on_cuda,
            "enable_sleep_mode": self._sleeps,
            "generation_config": "vllm",
            "logprobs_mode": "processed_logprobs",
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
            **self._memory_arguments(),
        }
        if policy.image_pixel_bounds is None:
            arguments["skip_tokenizer_init"] = True
        else:
            shortest, longest = policy.image_pixel_bounds
            num_encoded = policy.max_pictures if self._features_of is None else 0
            arguments |= {
                # With 0 and embeddings vLLM does not load the tower (1.3 GB for a bfloat16 7B).
                "limit_mm_per_prompt": {"image": num_encoded, "video": 0},
                "enable_mm_embeds": self._features_of is not None,
                "mm_processor_kwargs": {
                    "size": {"shortest_edge": shortest, "longest_edge": longest}
                },
                # The policy's processor has already prepared the pixels.
                "mm_device_do_normalize": False,
                "mm_processor_cache_gb": 0,
            }
        if not self._on_cuda:
            # If the prompt of a seeded request is split, vLLM rewinds the request's generator; a
            # CPU generator cannot be rewound, and the engine would crash.
            arguments["enable_chunked_prefill"] = False
            # A group shares only whole cache blocks of its prompt. A tiny prompt is shorter than
            # the CPU's default block of 128 tokens; CPU attention needs at least 32.
            arguments["block_size"] = 32
        if self._setup.world_size > 1:
            # Uses LOCAL_RANK; the default executor would put every rank on device 0.
            arguments["distributed_executor_backend"] = "external_launcher"
        if lora is not None:
            arguments |= {
                "enable_lora": True,
                "max_lora_rank": min(rank for rank in LORA_RANKS if rank >= lora.r),
                "enable_tower_connector_lora": policy.adapts_vision_tower,
            }
        return arguments

    def _memory_arguments(self) -> dict[str, Any]:
        """Given a cache size, vLLM does no profiling and only checks that the share is free."""
        share, claim = self.config.gpu_memory_utilization, self._setup.claim
        if not self._on_cuda:
            return {"gpu_memory_utilization": CPU_SHARE, "kv_cache_memory_bytes": CPU_CACHE_BYTES}
        if share != "auto":
            return {"gpu_memory_utilization": share, "kv_cache_memory_bytes": None}
        if claim is None:
            raise ValueError(
                "engine.gpu_memory_utilization: 'auto' needs the policy's size, which neither its "
                "name nor its folder tells; give a share, such as 0.35"
            )
        return {"gpu_memory_utilization": claim.share, "kv_cache_memory_bytes": claim.cache_bytes}

    def generate(
        self, prompts_P: Sequence[Prompt], params: SamplingParams, seeds_P: Sequence[int]
    ) -> list[list[Completion]]:
        """completions_PG. Temperature 0 takes the likeliest token (all G members are then equal).

        After an exception, which ends a run, do not call it again: vLLM would never return.
        """
        import torch

        from rl.engines import vllm_requests

        features_P: Sequence[torch.Tensor | None] = [None] * len(prompts_P)
        if self._features_of is not None:
            features_P = self._features_of(prompts_P)
        requests_P = [
            (
                vllm_requests.engine_input(prompt, features, self._image_token_id, self._dtype),
                self._sampling(prompt, params, seed),
            )
            for prompt, features, seed in zip(prompts_P, features_P, seeds_P, strict=True)
        ]
        # vLLM also draws an unused number from the global generator in each step.
        with torch.random.fork_rng([self._setup.device] if self._on_cuda else []):
            outputs_P = self._run(requests_P)
        completions_PG = [
            [
                vllm_requests.completion(member, self._stop_ids, prompt.grid, self._vocabulary)
                for member in output.outputs
            ]
            for prompt, output in zip(prompts_P, outputs_P, strict=True)
        ]
        return [group * (params.num_completions // len(group)) for group in completions_PG]

    def _run(self, requests_P: Sequence[tuple[Any, Any]]) -> list[Any]:
        """A `RequestOutput` for each (input, sampling parameters)."""
        engine = self._llm.llm_engine
        lora_request = None
        if self._has_lora and self._fingerprint is not None:
            from vllm.lora.request import LoRARequest

            # The path is never read: the adapter of this number is already in the slots.
            lora_request = LoRARequest("policy", ADAPTER_ID, "in-memory")
        ids_P = [str(next(self._numbers)) for _ in requests_P]
        for request_id, (engine_input, sampling) in zip(ids_P, requests_P, strict=True):
            engine.add_request(request_id, engine_input, sampling, lora_request=lora_request)
        finished: dict[str, Any] = {}
        while engine.has_unfinished_requests():
            finished |= {output.request_id: output for output in engine.step() if output.finished}
        return [finished[request_id] for request_id in ids_P]

    def _sampling(self, prompt: Prompt, params: SamplingParams, seed: int) -> Any:
        """A group is ONE request with `n` = G; vLLM draws member g with seed + g."""
        from vllm import SamplingParams as VllmSamplingParams
        from vllm.sampling_params import RequestOutputKind

        grid = prompt.grid if self._vocabulary else None
        return VllmSamplingParams(
            n=params.num_completions if params.temperature > 0 else 1,
            seed=seed,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            max_tokens=params.max_tokens,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            ignore_eos=True,  # the policy's stop ids are the only ones
            stop_token_ids=self._stop_ids,
            logit_bias=self._bans,
            extra_args={GRID: grid} if grid else None,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def sleep(self) -> None:
        """Free the device for others, if the engine does not stay on it."""
        if self._sleeps and self._sleep_sums is None:
            [self._sleep_sums] = self._llm.collective_rpc(parameter_sums)
            self._llm.sleep(level=1)

    def wake(self) -> None:
        """Undo `sleep`. Raises RuntimeError if any weight, trained or not, has changed: some
        versions of vLLM corrupt weights during sleep."""
        if self._sleep_sums is None:
            return
        self._llm.wake_up()
        [changed] = self._llm.collective_rpc(parameter_difference, args=(self._sleep_sums,))
        self._sleep_sums = None
        if problem := changed or (self._fingerprint and self._difference()):
            raise RuntimeError(
                f"the inference engine woke up with {problem}. Set engine.residency: 'resident', "
                "or use another version of vLLM"
            )

    def load_weights(self, weights: PolicyWeights) -> None:
        """Load the trainer's weights; the engine must be awake. Untrained weights are kept."""
        lora = self._setup.policy.config.lora
        if lora is not None:
            if fingerprint(weights.tensors) != weights.fingerprint:
                raise RuntimeError(
                    "the adapter that reached the inference engine is not the one that the trainer "
                    "sent: its tensors do not have its fingerprint. Pass them on unchanged"
                )
            clones = {name: tensor.clone() for name, tensor in weights.tensors.items()}
            [self._expected] = self._llm.collective_rpc(
                put_lora, args=(clones, weights.lora_config, lora.alpha / lora.r)
            )
        else:
            tensors = weights.tensors.items()
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(tensors)})
            [self._expected] = self._llm.collective_rpc(full_sums, args=(tensors,))
            self._reads_back = len(self._expected) == len(tensors)
        self._fingerprint = weights.fingerprint
        # What was computed from earlier weights.
        self._llm.reset_prefix_cache()
        self._llm.llm_engine.reset_encoder_cache()

    def held_fingerprint(self) -> str | None:
        """The loaded weights' fingerprint if every tensor that the worker's forward uses equals
        what was sent, in the engine's dtype; otherwise what differs. None if it is unknown where
        vLLM's model keeps a tensor."""
        if self._fingerprint is None:
            return "nothing: no weights were loaded"
        return self._difference() or (self._fingerprint if self._reads_back else None)

    def _difference(self) -> str:
        compare: Any = lora_difference if self._has_lora else full_difference
        [difference] = self._llm.collective_rpc(compare, args=(self._expected,))
        return str(difference)

    def close(self) -> None:
        """Shut down, but keep running with several ranks: it shares the trainer's process group."""
        core = self._llm.llm_engine.engine_core
        if self._setup.world_size > 1:
            core._finalizer.detach()
            return
        shut_down(core, keeps_group=self._group_existed)
        del self._llm


def grammar_arguments(
    folder: str, arguments: Mapping[str, Any], vocabulary: ImageVocabulary
) -> dict[str, Any]:
    """vLLM's arguments for the image grammar: the logits processor for its model runner."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    from rl.engines import vllm_requests

    # Each model runner refuses the other's class; only the final config says which one runs.
    planned = EngineArgs(folder, **arguments).create_engine_config(UsageContext.LLM_CLASS)
    processor = vllm_requests.V2Grammar if planned.use_v2_model_runner else vllm_requests.V1Grammar
    return {"logits_processors": [processor], "additional_config": {VOCABULARY: asdict(vocabulary)}}
