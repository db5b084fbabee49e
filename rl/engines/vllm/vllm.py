"""The fast inference engine: vLLM in the trainer's process, on the trainer's device.

Axes: `_P` prompts, `_G` completions in a group.
"""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rl.api.engine import Engine, EngineMemory, EngineSetup, Residency
from rl.api.plug import PlacedConfig, too_old, unread
from rl.api.policy import Policy, PolicyConfig
from rl.api.types import Completion, PolicyWeights, Prompt, SamplingParams
from rl.config.schema import RunConfig, vllm_build
from rl.engines.vllm import engine_weights, start
from rl.engines.vllm.vllm_config import GRID, Config
from rl.files.weights import fingerprint

if TYPE_CHECKING:
    import torch

ENVIRONMENT = {
    # In process: weights are handed over as tensors, and a policy and its engine share a device.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    # On a GPU float32 attention is Triton's, whose products would have TF32's 10 bits of mantissa.
    "TRITON_F32_DEFAULT": "ieee",
}
"""Set before the first `import vllm`, where the user has not set them."""

BANNED_BIAS = -1e9
"""Added to a banned id's logit: exp of it is exactly 0 in float32, as in the trainer's softmax."""

OWN_GB, GRAPHS_GB = 1.0, 0.6
"""What vLLM keeps for itself beside its largest step, assumed: buffers, kernels' workspaces, NCCL;
and CUDA graphs of one set of batch sizes, of which an adapter makes a second."""

CPU_CACHE_MB = 256
"""Key-value cache on a CPU."""
UNPLANNED_SHARE = 0.01
"""Share of the device that must be free where a cache size is set and no plan was made."""
UNMERGEABLE = (
    "adapter: 'merged' adds to the policy's base weights, which ZeRO-3 shards; use 'served', or "
    "optimizer.zero_stage <= 2"
)

BFLOAT16_CAPABILITY = 8.0
"""Compute capability (Ampere); `check_if_supports_dtype` in vllm/platforms/cuda.py."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Slot sizes vLLM offers."""


def sleeps_between(residency: Residency, has_room: bool, device: str) -> bool:
    """Whether the engine frees the device while others use it."""
    wanted = residency == "sleep" or (residency == "auto" and not has_room)
    return wanted and device.startswith("cuda")


class VllmEngine(Engine[Config]):
    """One engine; starting it takes seconds, minutes for a large model.

    Raises ValueError where `adapter: 'merged'` is asked of a sharded policy.
    """

    def __init__(self, config: Config, setup: EngineSetup) -> None:
        super().__init__(config, setup)
        policy = setup.policy
        merges = policy.config.lora is not None and config.adapter == "merged"
        if merges and setup.sharded:
            raise ValueError(f"engine.{UNMERGEABLE}")
        reads_features = (
            policy.image_pixel_bounds is not None
            and policy.has_frozen_tower(policy.config)
            and not setup.sharded
        )
        self._setup = setup
        self._sleeps = sleeps_between(config.residency, setup.has_room, setup.device)
        self._features_of = policy.picture_features if reads_features else None
        """The policy's vision tower in place of one of the engine's own; None: pictures are
        encoded here."""
        self._merged_weights = policy.merged_weights if merges else None
        """`adapter: 'merged'`; None: the adapter is served, or there is none."""
        self._on_cuda = setup.device.startswith("cuda")
        self._stop_ids = list(policy.stop_token_ids)
        self._bans = dict.fromkeys(policy.banned_token_ids, BANNED_BIAS)
        self._vocabulary = policy.image_vocabulary
        self._kind = "full" if policy.config.lora is None else "lora"
        self._serves_adapter = self._kind == "lora" and not merges
        self._failed = False
        self._fingerprint: str | None = None
        self._expected: engine_weights.Lora | engine_weights.Whole = {}
        """What the worker was given last."""
        self._unplaced: list[str] = []
        """Names of tensors that were given and cannot be read back."""
        self._asleep: Mapping[str, torch.Tensor] | None = None
        """Sums of what the worker fell asleep with; None: it is awake."""
        self._num_requests = 0
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
            adapter_gb=graphs_gb if config.adapter == "served" else 0,
            cache_mb=config.kv_cache_memory_mb,
            dtype=None if config.dtype == "auto" else config.dtype,
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            residency=config.residency,
        )

    @classmethod
    def problems(cls, config: Config, run: RunConfig) -> Iterable[str]:
        optimizer = run.optimizer
        sharded = optimizer.backend == "deepspeed" and optimizer.zero_stage == 3
        if sharded and config.adapter == "merged":
            yield UNMERGEABLE
        rank = (run.policy.get("lora") or {}).get("r", 0)
        if config.adapter == "served" and rank > LORA_RANKS[-1]:
            yield f"adapter: 'served' ends at rank {LORA_RANKS[-1]}; lower policy.lora.r ({rank})"
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
        if dtype == "bfloat16":
            instead = "set engine.dtype=float16, or use engine.type=transformers"
            what = "dtype: vLLM's bfloat16"
            yield from too_old(capability, BFLOAT16_CAPABILITY, what, instead)
        adapts = isinstance(policy, PolicyConfig) and policy.lora is not None
        if adapts and config.adapter == "served" and dtype == "float32":
            other = "policy.dtype=bfloat16" if config.dtype == "auto" else "engine.dtype=auto"
            yield (
                "adapter: on a GPU vLLM serves an adapter in 16 bits only, and its dtype is "
                f"float32; set {other}, engine.adapter=merged, or engine.type=transformers, or run "
                "on the CPU (policy.device=cpu)"
            )

    @classmethod
    def no_effect(cls, config: Config) -> Iterable[str]:
        if config.kv_cache_memory_mb is None:
            return []
        return unread(config, "gpu_memory_utilization", "kv_cache_memory_mb is given")

    def _start(self, policy: Policy) -> Any:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        if not self._on_cuda:
            # Log-probs run through a compiled function even in eager mode, which would need a C++
            # compiler on the box.
            from torch import _dynamo

            _dynamo.config.disable = True
        folder = policy.engine_folder()
        # Some of it warns before its own configuration says how loud it may be.
        logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])
        with start.untouched_globals(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"`torch\.distributed\.reduce_op` is deprecated")
            import torch
            from vllm import LLM

            self._found_group = torch.distributed.is_initialized()
            start.register_in_process(folder)
            if self._serves_adapter and not self._on_cuda:
                start.multiply_by_one_adapter()
            arguments = self._arguments(policy)
            if self._vocabulary is not None:
                arguments |= start.grammar_arguments(folder, arguments, self._vocabulary)
            return LLM(folder, **arguments)

    def _arguments(self, policy: Policy) -> dict[str, Any]:
        config = self.config
        arguments: dict[str, Any] = {
            "dtype": policy.config.dtype if config.dtype == "auto" else config.dtype,
            "seed": 0,
            "max_model_len": config.max_model_len
            or policy.config.max_prompt_tokens + policy.setup.max_completion_tokens,
            "max_num_seqs": config.max_num_seqs,
            "enforce_eager": config.enforce_eager or not self._on_cuda,
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
            encodes = self._features_of is None
            arguments |= {
                # None and embeddings: vLLM then leaves the tower out (1.3 GB of a bfloat16 7B).
                "limit_mm_per_prompt": {
                    "image": policy.max_pictures if encodes else 0,
                    "video": 0,
                },
                "enable_mm_embeds": not encodes,
                "mm_processor_kwargs": {"size": edges},
                # Pixels come as the policy's processor made them: nothing is left to do or keep.
                "mm_device_do_normalize": False,
                "mm_processor_cache_gb": 0,
            }
        arguments |= self._memory_arguments()
        if not self._on_cuda:
            # A seeded request whose prompt is cut in two rewinds its generator, which a CPU's
            # cannot do: the engine would die as soon as an iteration's prompts fill a step.
            arguments["enable_chunked_prefill"] = False
            # A group shares whole cache blocks of its prompt only. The CPU's default of 128 tokens
            # is longer than a tiny prompt; 32 is the smallest that its attention takes.
            arguments["block_size"] = 32
        if self._sleeps:
            arguments["enable_sleep_mode"] = True
        if self._setup.world_size > 1:
            # Reads torchrun's LOCAL_RANK; the default executor would put every rank on device 0.
            arguments["distributed_executor_backend"] = "external_launcher"
        lora = policy.config.lora
        if self._serves_adapter and lora is not None:
            arguments |= {
                "enable_lora": True,
                "max_lora_rank": min(rank for rank in LORA_RANKS if rank >= lora.r),
                "enable_tower_connector_lora": policy.adapts_vision_tower,
            }
        return arguments

    def _memory_arguments(self) -> dict[str, Any]:
        """Given a cache size, vLLM measures nothing and only checks that the share is free."""
        config, claim = self.config, self._setup.claim
        cache_mb = config.kv_cache_memory_mb or (None if self._on_cuda else CPU_CACHE_MB)
        cache_bytes = None if cache_mb is None else cache_mb << 20
        share: float | None = None
        if config.gpu_memory_utilization != "auto":
            share = config.gpu_memory_utilization
        elif claim is not None:
            share, cache_bytes = claim.share, cache_bytes or claim.cache_bytes
        elif cache_bytes is not None:
            share = UNPLANNED_SHARE
        else:
            raise ValueError(
                "engine.gpu_memory_utilization: 'auto' is reckoned from the policy's size, which "
                "neither its name nor its folder tells; give a share, such as 0.35"
            )
        stated = {} if cache_bytes is None else {"kv_cache_memory_bytes": cache_bytes}
        return {"gpu_memory_utilization": share, **stated}

    def generate(
        self, prompts_P: Sequence[Prompt], params: SamplingParams, seeds_P: Sequence[int]
    ) -> list[list[Completion]]:
        """completions_PG. Temperature 0 takes the likeliest token (all G members are then equal).

        Any exception inside the engine is final: vLLM would spin for ever on its next call.
        """
        if self._failed:
            raise RuntimeError("the vLLM engine failed before and cannot be used again")
        import torch

        from rl.engines.vllm import requests

        features_P: Sequence[torch.Tensor | None] = [None] * len(prompts_P)
        if self._features_of is not None:
            features_P = self._features_of(prompts_P)
        inputs_P = [
            requests.engine_input(prompt, features, self._image_token_id, self._dtype)
            for prompt, features in zip(prompts_P, features_P, strict=True)
        ]
        sampling_P = [
            self._sampling(prompt, params, seed)
            for prompt, seed in zip(prompts_P, seeds_P, strict=True)
        ]
        try:
            # Seeded requests draw from generators of their own, and a sampling step from the
            # global one besides, whose draw nobody uses: the trainer must not notice.
            with torch.random.fork_rng([self._setup.device] if self._on_cuda else []):
                outputs_P = self._run(inputs_P, sampling_P)
        except BaseException:
            self._failed = True
            raise
        return [
            self._group(prompt, output, params)
            for prompt, output in zip(prompts_P, outputs_P, strict=True)
        ]

    def _run(self, inputs_P: Sequence[Any], sampling_P: Sequence[Any]) -> list[Any]:
        """A `RequestOutput` for each input."""
        engine = self._llm.llm_engine
        lora_request = None
        if self._serves_adapter and self._fingerprint is not None:
            from vllm.lora.request import LoRARequest

            # The path is never read: the adapter of this number is in the slots already.
            lora_request = LoRARequest("policy", engine_weights.ADAPTER_ID, "in-memory")
        names_P = []
        for engine_input, sampling in zip(inputs_P, sampling_P, strict=True):
            names_P.append(str(self._num_requests))
            self._num_requests += 1
            engine.add_request(names_P[-1], engine_input, sampling, lora_request=lora_request)
        finished: dict[str, Any] = {}
        while engine.has_unfinished_requests():
            finished |= {output.request_id: output for output in engine.step() if output.finished}
        return [finished[name] for name in names_P]

    def _sampling(self, prompt: Prompt, params: SamplingParams, seed: int) -> Any:
        """A group is ONE request with `n` = G, whose member g vLLM draws from seed + g: as G
        requests it took 3 to 5 % less CPU time, for G times as many to keep in order."""
        from vllm import SamplingParams as VllmSamplingParams
        from vllm.sampling_params import RequestOutputKind

        grid = self._grid(prompt)
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

    def _group(self, prompt: Prompt, output: Any, params: SamplingParams) -> list[Completion]:
        from rl.engines.vllm import requests

        completions_G = [
            requests.completion(member, self._stop_ids, self._grid(prompt), self._vocabulary)
            for member in output.outputs
        ]
        return completions_G * (params.num_completions // len(completions_G))

    def _grid(self, prompt: Prompt) -> tuple[int, int] | None:
        """(h, w) to which its completions are held; None: they are free."""
        return prompt.grid if self._vocabulary else None

    def sleep(self) -> None:
        """Give the device to the others, where the engine does not stay on it."""
        if self._sleeps and self._asleep is None:
            [self._asleep] = self._llm.collective_rpc(engine_weights.parameter_sums)
            self._llm.sleep(level=1)

    def wake(self) -> None:
        """Undo `sleep`. Raises RuntimeError when the weights are not those from before it, an
        adapter's and its base's among them."""
        if self._asleep is None:
            return
        self._llm.wake_up()
        [lost] = self._llm.collective_rpc(engine_weights.parameter_difference, args=(self._asleep,))
        self._asleep = None
        if problem := lost or (self._fingerprint and self._difference()):
            self._failed = True
            raise RuntimeError(
                f"the inference engine woke up with {problem}. Set engine.residency: 'resident', "
                "or use another version of vLLM"
            )

    def load_weights(self, weights: PolicyWeights) -> None:
        """Take the trainer's weights; the engine must be awake. What was not trained stays as it
        was, under an adapter the whole base."""
        if weights.kind != self._kind:
            raise ValueError(f"this engine was started for another kind than {weights.kind!r}")
        lora = self._setup.policy.config.lora
        if self._serves_adapter and lora is not None:
            if fingerprint(weights.tensors) != weights.fingerprint:
                raise RuntimeError(
                    "the adapter that reached the inference engine is not the one that the trainer "
                    "sent: its tensors no longer have its fingerprint. Hand them on unchanged"
                )
            clones = {name: tensor.clone() for name, tensor in weights.tensors.items()}
            [self._expected] = self._llm.collective_rpc(
                engine_weights.put_lora, args=(clones, weights.lora_config, lora.alpha / lora.r)
            )
        else:
            self._llm.collective_rpc(
                "reload_weights", kwargs={"weights_iterator": iter(self._whole(weights))}
            )
            [(self._expected, self._unplaced)] = self._llm.collective_rpc(
                engine_weights.whole_sums, args=(self._whole(weights),)
            )
        self._fingerprint = weights.fingerprint
        self._drop_caches()

    def _drop_caches(self) -> None:
        """Forget everything computed from earlier weights."""
        self._llm.reset_prefix_cache()
        self._llm.llm_engine.reset_encoder_cache()

    def _whole(self, weights: PolicyWeights) -> Iterable[tuple[str, torch.Tensor]]:
        """Every matrix that goes over, under transformers' name."""
        return self._merged_weights() if self._merged_weights else weights.tensors.items()

    def held_fingerprint(self) -> str | None:
        """The loaded weights' fingerprint when what the worker's forward multiplies with is what
        was sent, every tensor, in the engine's dtype; else what is wrong. None when a tensor went
        to a place that we do not know."""
        if self._fingerprint is None:
            return "nothing: it was given no weights"
        return self._difference() or (None if self._unplaced else self._fingerprint)

    def _difference(self) -> str:
        compare = (
            engine_weights.lora_difference
            if self._serves_adapter
            else engine_weights.whole_difference
        )
        [difference] = self._llm.collective_rpc(compare, args=(self._expected,))
        return str(difference)

    def close(self) -> None:
        """Stop it; with several ranks it stays, or the trainer's process group would go with it."""
        core = self._llm.llm_engine.engine_core
        if self._setup.world_size > 1:
            core._finalizer.detach()
            return
        start.shut_down(core, keeps_group=self._found_group)
        del self._llm
