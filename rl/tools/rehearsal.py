"""Runs one iteration at real size on a fake GPU, whose tensors have no values, and counts."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from PIL import Image
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary

from rl import build
from rl.api import image_grammar
from rl.api.plugin import PluginConfig, Resources
from rl.api.policy import Policy
from rl.api.reward import Reward
from rl.api.types import Prompt, RewardInput, RewardOutput, Sample, UnusableSampleError
from rl.check import memory_plan
from rl.check.memory_plan import CONTEXT_GB, MODELS
from rl.config.loading import located, merge
from rl.config.schema import RunConfig
from rl.judge.http import BackgroundLoop
from rl.learner.learner import NUM_MEASURED, Learner
from rl.learner.train_step import TrainStep
from rl.model_files import cached
from rl.progress import PhaseTimer
from rl.ranks import heartbeat
from rl.ranks.dist import Dist
from rl.rollout.stream import RolloutContext, Sampled, begin, train_sequences

# ---- tally ---------------------------------------------------------------------------------------
# Counts of a rehearsal: bytes by device and phase, FLOPs by phase.

BLOCK_BYTES = 512
"""PyTorch's allocator on CUDA rounds every allocation up to this."""


class Tally:
    """The counts of one rehearsal. Storages are counted once, whatever views of them exist."""

    def __init__(self) -> None:
        self.phase = "load"
        self.now: Counter[str] = Counter()
        """Device type -> bytes that exist."""
        self.peak: Counter[str] = Counter()
        """Phase -> most bytes that existed at once on the GPU in that phase."""
        self.flops: Counter[str] = Counter()
        """Phase -> floating-point operations of matrix products, convolutions and attention."""
        self._seen: WeakIdKeyDictionary = WeakIdKeyDictionary()

    @contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """Count what happens inside as part of `phase`; phases may be nested and repeated."""
        before, self.phase = self.phase, phase
        self._note_peak()
        try:
            yield
        finally:
            self.phase = before
            self._note_peak()

    def track(self, tensor: torch.Tensor) -> None:
        """Count the tensor's storage until it is freed."""
        storage = tensor.untyped_storage()
        if storage in self._seen:
            return
        device = tensor.device.type
        self._seen[storage] = size = -(-storage.nbytes() // BLOCK_BYTES) * BLOCK_BYTES
        self.now[device] += size
        self._note_peak()
        weakref.finalize(storage, self.now.subtract, {device: size})

    def _note_peak(self) -> None:
        self.peak[self.phase] = max(self.peak[self.phase], self.now["cuda"])


# ---- fake gpu ------------------------------------------------------------------------------------
# A fake GPU: 'cuda' tensors have shapes, dtypes and bytes, but no values.
#
# CPU tensors stay real, except while models load (`host_is_fake`). What the host fetches from the
# GPU is zeros or True. Needs `load_cuda_guard()` before the first `import torch`.

MAX_FETCHED_BYTES = 2**26
"""A larger tensor that is copied to the host stays fake there."""
NEED_VALUES = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "equal",
    "is_nonzero",
    "_unique2",
    "unique_consecutive",
}
"""Operations whose result's size or value the host needs."""
ONE_DTYPE = {
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "convolution",
    "linear",
    "addcmul",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_varlen_attn",
}
"""Operations that CUDA refuses for inputs of several dtypes; fake tensors do not check it."""


class FakeGpu(TorchDispatchMode):
    """Runs every operation on 'cuda' tensors without values, and counts it in `tally`."""

    def __init__(self) -> None:
        super().__init__()
        self.tally = Tally()
        self.host_is_fake = False
        """While models load: their weights have no values on the host either."""
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        is_fake = any(isinstance(leaf, FakeTensor) for leaf in leaves)
        device = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
        is_born_fake = self.host_is_fake and not leaves and str(device) != "meta"
        if not is_fake and not is_born_fake and (device is None or device.type != "cuda"):
            return func(*args, **kwargs)
        name = func.__name__.split(".")[0]
        if name in NEED_VALUES:
            on_device = partial(self._on_device, device=args[0].device)
            return tree_map_only(torch.Tensor, on_device, func(*tree_map(on_host, args), **kwargs))
        is_fetched = name == "_to_copy" and str(device) == "cpu"
        if is_fetched and not self.host_is_fake and args[0].nbytes <= MAX_FETCHED_BYTES:
            return on_host(args[0]).to(kwargs.get("dtype") or args[0].dtype)
        if name == "copy_" and not isinstance(args[0], FakeTensor):
            return args[0]
        if name == "index":
            args = (args[0], self._without_masks(args[1], args[0].device))
        dtypes = {str(leaf.dtype) for leaf in leaves if leaf.dtype.is_floating_point}
        if name in ONE_DTYPE and len(dtypes) > 1:
            raise RuntimeError(f"{name} of {' and '.join(sorted(dtypes))}, which a GPU refuses")
        args, kwargs = tree_map_only(torch.Tensor, self._as_fake, (args, kwargs))
        with self._fake:
            out = func(*args, **kwargs)
        # Weak references in this memo would keep `Module.to` from swapping parameters.
        self._fake.fake_tensor_converter.meta_converter.tensor_memo.clear()
        # PyTorch's FLOP formulas without its `FlopCounterMode`, which keeps recomputed activations
        # alive, so that memory peaks would be wrong.
        if formula := flop_registry.get(func._overloadpacket):
            self.tally.flops[self.tally.phase] += formula(*args, **kwargs, out_val=out)
        for tensor in tree_leaves(out):
            if isinstance(tensor, FakeTensor):
                self.tally.track(tensor)
        return out

    def _as_fake(self, tensor: torch.Tensor) -> FakeTensor:
        """A real tensor as a fake one. FakeTensorMode alone would keep a small tensor as a constant
        and run the real CUDA kernel on it."""
        return tensor if isinstance(tensor, FakeTensor) else self._fake.from_tensor(tensor)

    def _on_device(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        with self._fake:
            return self._fake.from_tensor(tensor).to(device)

    def _without_masks(self, indices: Any, device: torch.device) -> list[torch.Tensor | None]:
        """Each boolean mask, whose values are unknown, as the positions of all its elements."""
        resolved: list[torch.Tensor | None] = []
        for index in indices:
            if index is not None and index.dtype == torch.bool:
                places = on_host(index).nonzero(as_tuple=True)
                resolved += [self._on_device(place, device) for place in places]
            else:
                resolved.append(index)
        return resolved


def on_host(leaf: Any) -> Any:
    """What the host gets for a tensor without values: zeros; for a boolean True, because a run
    fetches booleans to check that all is well."""
    if not isinstance(leaf, FakeTensor):
        return leaf
    fill = torch.ones if leaf.dtype == torch.bool else torch.zeros
    return fill(leaf.shape, dtype=leaf.dtype)


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Scaled dot-product attention as a GPU computes it. A CPU build of PyTorch would choose the
    math backend, which makes [S, S] scores in float32."""
    if query.device.type != "cuda" or attn_mask is not None or query.dtype == torch.float32:
        return _SDPA(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa and key.shape[1] != query.shape[1]:
        times = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    attend = torch.ops.aten._scaled_dot_product_flash_attention
    return attend(query, key, value, dropout_p, is_causal, scale=scale)[0]


_SDPA = torch.nn.functional.scaled_dot_product_attention


@contextmanager
def fake_gpu() -> Iterator[FakeGpu]:
    """Inside, `torch.cuda` reports a GPU of compute capability 9.0, and `cuda:0` is fake."""
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        with (
            mock.patch.multiple(
                torch.cuda,
                is_available=lambda: True,
                get_device_capability=lambda device=None: (9, 0),
                get_rng_state=lambda device=None: torch.empty(0),
                set_rng_state=lambda state, device=None: None,
                _lazy_init=lambda: None,
            ),
            mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", _flash),
            mock.patch.object(torch.Tensor, "pin_memory", lambda tensor: tensor),
            FakeGpu() as gpu,
        ):
            yield gpu
    finally:
        torch._C._set_only_lift_cpu_tensors(before)


# ---- rehearsal -----------------------------------------------------------------------------------
# Runs one iteration of a config at real size on a fake GPU: conditioning, rendering, loss,
# backward, optimizer step and export are the project's own code, on tensors without values.
#
# Axes: `_P` prompts on this rank, `_G` completions in a group.

MODEL_KEYS = ("model_path", "tokenizer_path", "init_text_encoder_from")
"""Keys of plugins' sections that name a model."""
DEPTH_KEYS = ("num_hidden_layers", "num_layers")
"""Keys of models' configs that hold their number of layers."""
MAX_GROUPS = 2
"""Limit of groups in the rehearsed iteration; more groups repeat the same work."""
RENDER_STEPS = 2
"""Denoising steps that are run; the operations of the others are the same."""


@dataclass(frozen=True)
class Rehearsed:
    """The measurements of one rehearsed iteration."""

    tally: Tally
    plan: memory_plan.Plan | None
    """The plan of the same run: one rank, no DeepSpeed, no inference engine, no judge."""
    size: str
    """How many groups, prompt tokens and pictures there were."""
    weights_bytes: dict[str, int]
    """'policy', 'renderer' -> bytes on the GPU."""
    seconds: float


def one_rank(config: RunConfig) -> RunConfig:
    """The config of rank 0 alone: its prompts, plain PyTorch, every model on one GPU."""
    values = config.model_dump()
    values["world_size"] = 1
    groups = config.prompts_per_iteration // config.world_size
    values["prompts_per_iteration"] = min(groups, MAX_GROUPS)
    values["render_pool"]["workers"] = 0
    values["final_reward"] = {}  # of a made-up reward
    values["optimizer"] |= {"backend": "torch", "zero_stage": 0}
    for section in (values["policy"], values["renderer"], *values["rewards"].values()):
        section.pop("device", None)
        section.pop("max_memory_gb", None)
    values["renderer"].pop("lora_path", None)
    return RunConfig.model_validate(values)


def rehearse(config: RunConfig, depth: int | None = None) -> Rehearsed:
    """Run one iteration. `depth`: layers of every model instead of their own; widths stay real.

    Raises ValueError for a model whose sizes are not known.
    """
    started = time.monotonic()
    resolved = build.resolve(one_rank(config))
    sizes = memory_plan.sizes(resolved)
    with (
        tempfile.TemporaryDirectory(prefix="rehearsal-") as work,
        fake_gpu() as gpu,
        _models_without_weights(gpu, depth),
        _phases_counted(gpu.tally),
        BackgroundLoop("judge") as loop,
    ):
        resolved = _with_skeletons(resolved, Path(work))
        return _iteration(resolved, sizes, gpu, loop, depth, started)


LEARNING = {
    "_compute_reference": "learn_reference",
    "_backward": "learn_backward",
    "_optimizer_step": "learn_step",
}
"""Method of `TrainStep` -> its phase of a rehearsal."""


@contextmanager
def _phases_counted(tally: Tally) -> Iterator[None]:
    """Inside, the tally records the phases of rollout and learner as its own."""
    counted = {
        name: tally.within(phase)(getattr(TrainStep, name)) for name, phase in LEARNING.items()
    }
    with (
        mock.patch.object(heartbeat, "phase", tally.within),
        mock.patch.multiple(TrainStep, **counted),
    ):
        yield


def _iteration(
    resolved: build.Resolved,
    sizes: memory_plan.Sizes | None,
    gpu: FakeGpu,
    loop: BackgroundLoop,
    depth: int | None,
    started: float,
) -> Rehearsed:
    config, tally, dist = resolved.config, gpu.tally, Dist(device="cuda:0")
    policy = build.build_policy(resolved, dist)
    weights = {"policy": tally.now["cuda"]}
    renderer = build.build_renderer(resolved, dist)
    weights["renderer"] = tally.now["cuda"] - weights["policy"]
    learner = Learner(policy, config, dist, num_iterations=100)
    with tally.within("first step"):  # Adam's moments are there from now on, as after a resume
        learner._backend.step(0.0, 1.0)
    with tally.within("load"):  # sets the phase's peak: weights and moments
        pass
    prompts_P = [
        _longest_prompt(resolved, policy, number) for number in range(config.prompts_per_iteration)
    ]
    with tally.within("picture"):
        policy.picture_features(prompts_P)
    rng = random.Random(0)
    completions_PG = [
        [
            _completion(policy, prompt, config.sampling.max_completion_tokens, rng)
            for _ in range(config.generations_per_prompt)
        ]
        for prompt in prompts_P
    ]
    makes_images = resolved.renderer.cls.makes_images
    bare_P = [
        # The words that fill the prompt would fill the bare variant's completion as well.
        policy.pass_through_completion(replace(prompt.sample, instruction="a"))
        if makes_images and config.bare_arm == "always"
        else None
        for prompt in prompts_P
    ]
    numbers_P = range(len(prompts_P))
    sampled = Sampled(prompts_P, completions_PG, numbers_P, [*map(str, numbers_P)], bare_P)
    sizes_P = [config.generations_per_prompt] * len(prompts_P)
    # Earlier iterations run one forward more, which reads values.
    step = learner.begin(NUM_MEASURED, prompts_P, sampled.token_ids, sizes_P)
    rewards = {"made-up": _StubReward(PluginConfig(type="made-up"), Resources(None, dist.device))}
    context = RolloutContext(config, policy, renderer, rewards, makes_images, loop)
    timer = PhaseTimer()
    pending = begin(context, sampled, step, timer, lambda: False)
    with tally.within("reference"):
        step.work_ahead(lambda: True)
    with tally.within("learn"):
        for p, episodes_G in pending.groups(timer, lambda: False):
            if failures := [episode.failure for episode in episodes_G if episode.failure]:
                raise RuntimeError(f"a picture cannot be drawn: {failures[0]}")
            advantages_G = [1.0 if g % 2 else -1.0 for g in range(len(episodes_G))]
            step.accumulate(p, train_sequences(config, policy, 0, episodes_G, advantages_G))
        step.step()
    with tally.within("export"):
        learner.export_weights()
    if sizes is not None:
        # Models of rewards are not rehearsed: CLIP runs in a thread of its own.
        frozen = [item for item in sizes.frozen if item.part.startswith("renderer")]
        if depth is not None:
            frozen = [item for item in frozen if item.part == "renderer, workspace"]
            gb = weights["renderer"] / 1e9
            frozen.append(memory_plan.Item("renderer weights", gb, memory_plan.PHASES))
            named = policy.module.named_parameters()
            params = sum(weight.numel() for name, weight in named if "lora_" not in name)
            sizes = replace(sizes, model=replace(sizes.model, num_layers=depth, params=params))
        sizes = replace(sizes, frozen=frozen, engine=None, judge_share=0.0)
    return Rehearsed(
        tally=tally,
        plan=None if sizes is None else memory_plan.plan(sizes, 1e3),
        size=f"{len(prompts_P)} groups, {len(prompts_P[0].token_ids)} prompt tokens, "
        f"{pending.num_pictures} pictures",
        weights_bytes=weights,
        seconds=time.monotonic() - started,
    )


# Models


def _with_skeletons(resolved: build.Resolved, work: Path) -> build.Resolved:
    """The same plugins, each model path replaced by a folder with only the model's config files."""

    def changed(plugin: Any) -> Any:
        section = plugin.config
        update: dict[str, Any] = {
            key: model_folder(getattr(section, key), getattr(section, "revision", None), work)
            for key in MODEL_KEYS
            if getattr(section, key, None)
        }
        if hasattr(section, "num_steps"):
            update["num_steps"] = RENDER_STEPS
        return replace(plugin, config=section.model_copy(update=update))

    return replace(resolved, policy=changed(resolved.policy), renderer=changed(resolved.renderer))


@contextmanager
def _models_without_weights(gpu: FakeGpu, depth: int | None) -> Iterator[None]:
    """Inside, `from_pretrained` reads a config file and makes weights without values."""
    from diffusers import ModelMixin
    from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

    from rl import model_files
    from rl.renderers import emu3_vq_loop
    from rl.renderers.stock_pipeline_loop import StockLoop

    loading = partial(mock.patch.object, gpu, "host_is_fake", True)

    def shortened(config: Any) -> Any:
        for part in (config, getattr(config, "text_config", None)):
            for key in DEPTH_KEYS if depth and part is not None else ():
                if isinstance(getattr(part, key, None), int):
                    setattr(part, key, depth)
                    if types := getattr(part, "layer_types", None):
                        setattr(part, "layer_types", types[:depth])  # noqa: B010 - any config
        return config

    def of_transformers(cls: Any, /, path: str, subfolder: str = "", **options: Any) -> Any:
        config = options.get("config")
        if config is None:
            reader = getattr(cls, "config_class", None) or AutoConfig
            config = reader.from_pretrained(path, subfolder=subfolder)
        make = cls.from_config if cls is AutoModelForImageTextToText else cls._from_config
        known = {k: options[k] for k in ("dtype", "attn_implementation") if k in options}
        with loading():
            model = make(shortened(config), **known)
        place = (options.get("device_map") or {}).get("", "cpu")
        model = model.eval().to(place) if place != "cpu" else model.eval()
        return (model, {"missing_keys": []}) if options.get("output_loading_info") else model

    def of_diffusers(cls: Any, /, path: str = "", subfolder: str = "", **options: Any) -> Any:
        path = options.get("pretrained_model_name_or_path", path)
        config = cls.load_config(path, subfolder=subfolder)
        if depth and "num_layers" in cls._get_init_keys(cls):
            config = {**config, "num_layers": depth}
        with loading():
            model = cls.from_config(config)
            torch.nn.Module.to(model, options["torch_dtype"])  # diffusers' own `to` warns
        place = (options.get("device_map") or {}).get("", "cpu")
        return model.to(place) if place != "cpu" else model

    def of_emu3_vq(path: str, revision: str | None, original: bool, device: str) -> Any:
        from transformers import Emu3VQVAE, Emu3VQVAEConfig

        with loading():
            config = Emu3VQVAEConfig.from_pretrained(path)  # nosec B615 # a local folder
            tensors = Emu3VQVAE(config).state_dict()
        return {name: tensor.to(device) for name, tensor in tensors.items()}

    patch = mock.patch.object
    with (
        patch(PreTrainedModel, "from_pretrained", classmethod(of_transformers)),
        patch(AutoModelForImageTextToText, "from_pretrained", classmethod(of_transformers)),
        patch(ModelMixin, "from_pretrained", classmethod(of_diffusers)),
        patch(emu3_vq_loop, "_read_tensors", of_emu3_vq),
        patch(model_files, "require_finite", lambda named, owner: None),
        # It compares pictures, which have no values here.
        patch(StockLoop, "try_out", lambda loop: None),
    ):
        yield


# The iteration's inputs


def _longest_prompt(resolved: build.Resolved, policy: Policy, number: int) -> Prompt:
    """A prompt of `policy.max_prompt_tokens` or slightly fewer tokens, with as many pictures of
    the renderer's output size as fit."""
    limit = int(resolved.policy.config.max_prompt_tokens)
    template = resolved.renderer.cls.prompt_template(resolved.renderer.config)
    max_pictures = min(1, policy.max_sources) if template is None else template.max_pictures
    area_px = getattr(resolved.renderer.config, "output_area_px", None) or 1024 * 1024
    rng, side = np.random.default_rng(number), round(area_px**0.5)
    has_codes = policy.image_vocabulary is not None
    codes = rng.integers(0, 1000, (32, 32)) if has_codes else None
    pictures = tuple(
        Image.fromarray(rng.integers(0, 255, (side, side, 3), dtype=np.uint8))
        for _ in range(0 if has_codes else max_pictures)
    )

    def prompt_of(num_words: int, num_pictures: int) -> Prompt | None:
        words, sources = " ".join(["a"] * num_words + [str(number)]), pictures[:num_pictures]
        sample = Sample(str(number), words, sources, source_codes=codes, target_codes=codes)
        with suppress(UnusableSampleError):
            return policy.build_prompt(sample)
        return None

    num_words = limit
    for num_pictures in range(max_pictures, -1, -1):
        while num_words > 0 and prompt_of(0, num_pictures):
            if prompt := prompt_of(num_words, num_pictures):
                return prompt
            num_words = num_words * 19 // 20
    raise ValueError(f"policy.max_prompt_tokens = {limit} is too small for any prompt; raise it")


def _completion(policy: Policy, prompt: Prompt, num_tokens: int, rng: random.Random) -> Any:
    """A completion of `num_tokens` tokens; a few words and an image if the policy writes images."""
    text = " ".join(rng.choice("abcdefgh") for _ in range(num_tokens))
    completion = policy.encode_completion(text)
    ids = (*completion.token_ids[: num_tokens - 1], completion.token_ids[-1])
    vocabulary = policy.image_vocabulary
    if vocabulary is not None and prompt.grid is not None:
        height, width = prompt.grid
        after = torch.arange(height * (width + 1) + 3)  # codes, row ends, three ends of the picture
        sides = torch.tensor(height), torch.tensor(width)
        kinds = image_grammar.allowed_kinds(after, *sides, vocabulary)
        codes = torch.randint(vocabulary.visual_start, vocabulary.visual_end, kinds.shape)
        picture = torch.where(kinds == image_grammar.VISUAL, codes, kinds).tolist()
        words = ids[: max(0, min(num_tokens - len(picture) - 1, 8))]
        ids = (*words, vocabulary.image, *picture)
    return replace(completion, token_ids=tuple(ids), logprobs=(0.0,) * len(ids))


class _StubReward(Reward):
    """Grades everything 0.5."""

    def grade(self, reward_input: RewardInput) -> RewardOutput:
        return RewardOutput(0.5)


# ---- rehearsal report ----------------------------------------------------------------------------
# What `rl rehearse` prints: memory beside the plan, operations.

PLANNED = {
    "load": ("load",),
    "condition": ("condition",),
    "render": ("render",),
    "reference": ("reference", "learn_reference"),
    "learn": ("learn_backward",),
    "step": ("learn_step",),
}
"""Phase of the memory plan -> its phases in a rehearsal."""


def lines(done: Rehearsed) -> Iterator[str]:
    """The report, at most 80 columns wide."""
    yield f"one rank, {done.size}, {done.seconds:.0f} s"
    yield "GPU memory, GB          rehearsed     plan  error"
    items = [] if done.plan is None else done.plan.items
    for owner, num_bytes in done.weights_bytes.items():
        prefix = "policy weights" if owner == "policy" else f"{owner} "
        planned = sum(item.gb for item in items if item.part.startswith(prefix))
        if num_bytes:
            yield _row(f"{owner} weights", num_bytes / 1e9, planned or None)
    for phase, gb in peaks_gb(done).items():
        planned_gb = None if done.plan is None else done.plan.total_gb(phase) - CONTEXT_GB
        yield _row(f"peak of {phase!r}", gb, planned_gb)
    if done.plan is None:
        yield "  no plan: rl check does not know the sizes of the policy's model"
    tflop = done.tally.flops.total() / 1e12
    yield f"\nmatrix products, convolutions and attention: {tflop:.1f} TFLOP"


def peaks_gb(done: Rehearsed) -> dict[str, float]:
    """The plan's phase -> its peak GPU memory in GB, without the CUDA context."""
    peaks = {name: max(done.tally.peak[phase] for phase in PLANNED[name]) for name in PLANNED}
    return {name: peak / 1e9 for name, peak in peaks.items() if peak}


def _row(name: str, gb: float, planned_gb: float | None) -> str:
    planned = "" if planned_gb is None else f"{planned_gb:>9.2f}  {planned_gb / gb - 1:+.1%}"
    return f"  {name:<22}{gb:>9.2f}{planned}"


# ---- skeletons -----------------------------------------------------------------------------------
# Models without weights: the config files of a tiny model, with the sizes of the real one.

WEIGHTS = ("*.safetensors", "*.bin", "*.pt")


def model_folder(path: str, revision: str | None, work: Path) -> str:
    """The folder, or cached hub id, with a model's config files and tokenizer. Raises ValueError
    for a hub id that is neither cached nor known."""
    if not path or Path(path).is_dir():
        return path
    if cached(path, "config.json", revision) or cached(path, "model_index.json", revision):
        return path
    if path not in MODELS["models"]:
        raise ValueError(
            f"the sizes of {path!r} are not known: fetch its config files first (hf download "
            f"{path} --exclude '*.safetensors'), or give a local model folder"
        )
    target = work / path.replace("/", "--")
    if not target.is_dir():
        _write(MODELS["models"][path], target)
    return str(target)


def _write(model: Mapping[str, Any], target: Path) -> None:
    model = MODELS["models"][model["same_as"]] if "same_as" in model else model
    _copy(model["like"], target)
    for folder, tiny in model.get("folders", {}).items():
        _copy(tiny, target / folder)
    for name, sizes in model["files"].items():
        file = target / name
        file.parent.mkdir(exist_ok=True)
        if isinstance(sizes, str):  # the text encoder has that policy's config
            sizes = MODELS["models"][sizes]["files"]["config.json"]
        # A config that names its class is complete: the class's defaults are the missing values.
        is_complete = "_class_name" in sizes or "model_type" in sizes
        tiny = {} if is_complete else json.loads(file.read_text())
        file.write_text(json.dumps(merge(tiny, sizes), indent=1))
    if (target / "text_encoder_3").is_dir():
        from transformers import T5TokenizerFast

        # One token per word: prompts are padded to one length anyway.
        pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -1.0), ("a", -2.0)]
        T5TokenizerFast(vocab=pieces, extra_ids=0).save_pretrained(target / "tokenizer_3")
    if model["like"] == "emu3":
        _fill_emu3_tokenizer(target / "tokenizer.json")


def _copy(tiny: str, target: Path) -> None:
    """Copy all files of a tiny model except its weights."""
    source = located(f"{MODELS['tokenizers']}/{tiny}")
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(*WEIGHTS), dirs_exist_ok=True)


def _fill_emu3_tokenizer(file: Path) -> None:
    """Give the tokenizer as many ids as the released one has: filler tokens that no text contains,
    then the special tokens, then all visual tokens."""
    tokenizer = json.loads(file.read_text())
    vocab = tokenizer["model"]["vocab"]
    specials = [token for token in tokenizer["added_tokens"] if "visual" not in token["content"]]
    first_special = MODELS["emu3_text_tokens"] - len(specials)
    for number in range(len(vocab), first_special):
        vocab[f"<filler {number}>"] = number
    names = [token["content"] for token in specials]
    names += [f"<|visual token {code:06d}|>" for code in range(MODELS["emu3_codes"])]
    tokenizer["added_tokens"] = [
        {**specials[0], "id": first_special + place, "content": name}
        for place, name in enumerate(names)
    ]
    file.write_text(json.dumps(tokenizer))
