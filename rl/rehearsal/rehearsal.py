"""Runs one iteration of a config at real size on a fake GPU: conditioning, rendering, loss,
backward, optimizer step and export are the project's own code, on tensors without values.

Axes: `_P` prompts on this rank, `_G` completions in a group.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from PIL import Image

from rl import build
from rl.api import image_grammar
from rl.api.policy import Policy
from rl.api.reward import Reward
from rl.api.types import Prompt, RewardInput, RewardOutput, Sample, UnusableSampleError
from rl.check import memory_plan
from rl.config.schema import RunConfig
from rl.console import PhaseTimer
from rl.judge.http import BackgroundLoop
from rl.learner.learner import NUM_MEASURED, Learner
from rl.learner.train_step import LearnerMetrics
from rl.ranks import heartbeat
from rl.ranks.dist import Dist
from rl.rehearsal.fake_gpu import FakeGpu, fake_gpu
from rl.rehearsal.skeletons import model_folder
from rl.rehearsal.tally import Tally
from rl.rollout.stream import RolloutContext, Sampled, begin, train_sequences

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
    num_groups: int
    num_prompt_tokens: int
    num_pictures: int
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
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as work, ExitStack() as stack:
        resolved = _with_skeletons(resolved, Path(work))
        gpu = stack.enter_context(fake_gpu())
        stack.enter_context(_models_without_weights(gpu, depth))
        # The tally records the phases of rollout and learner as its own.
        within, patch = gpu.tally.within, mock.patch.object
        stack.enter_context(patch(heartbeat, "phase", within))
        stack.enter_context(patch(LearnerMetrics, "clock", lambda _, phase: within(phase)))
        loop = stack.enter_context(BackgroundLoop("judge"))
        return _iteration(resolved, sizes, gpu, loop, depth, started)


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
        # The words that fill the prompt would fill the bare arm's completion as well.
        policy.pass_through_completion(replace(prompt.sample, instruction="a"))
        if makes_images and config.bare_arm == "always"
        else None
        for prompt in prompts_P
    ]
    sampled = Sampled(
        prompts_P,
        completions_PG,
        list(range(len(prompts_P))),
        [str(number) for number in range(len(prompts_P))],
        bare_P,
    )
    sizes_P = [len(completions_G) for completions_G in completions_PG]
    # Earlier iterations run one forward more, which reads values.
    step = learner.begin(NUM_MEASURED, prompts_P, sampled.token_ids, sizes_P)
    rewards = {
        name: _StubReward(_parts_of(config, name))
        for name, plugin in resolved.rewards.items()
        if not plugin.keys.held_out_only
    }
    context = RolloutContext(config, policy, renderer, rewards, makes_images, loop)
    timer = PhaseTimer()
    pending = begin(context, sampled, step, timer, lambda: False)
    with tally.within("reference"):
        step.prefetch_reference(lambda: True)
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
        renderers = [model for model in sizes.frozen if model.name == "renderer"]
        sizes = replace(sizes, frozen=renderers, engine=None, judge_share=0.0)
        sizes = _with_depth(sizes, policy, weights["renderer"], depth)
    return Rehearsed(
        tally=tally,
        plan=None if sizes is None else memory_plan.plan(sizes, 1e3),
        num_groups=len(prompts_P),
        num_prompt_tokens=len(prompts_P[0].token_ids),
        num_pictures=pending.num_pictures,
        weights_bytes=weights,
        seconds=time.monotonic() - started,
    )


def _with_depth(
    sizes: memory_plan.Sizes, policy: Policy, renderer_bytes: int, depth: int | None
) -> memory_plan.Sizes:
    """`sizes` with `depth` layers and with the weights that were built for this depth."""
    if depth is None:
        return sizes
    named = policy.module.named_parameters()
    params = sum(weight.numel() for name, weight in named if "lora_" not in name)
    frozen = [
        replace(model, weights={"weights": renderer_bytes / model.bytes_per_value})
        if model.name == "renderer" and model.weights
        else model
        for model in sizes.frozen
    ]
    model = replace(sizes.model, num_layers=depth, params=params)
    return replace(sizes, model=model, frozen=frozen)


# Models


def _with_skeletons(resolved: build.Resolved, work: Path) -> build.Resolved:
    """The same plugins, each model path replaced by a folder with only the model's config files."""

    def changed(plugin: Any) -> Any:
        section = plugin.config
        update = {
            key: model_folder(getattr(section, key), getattr(section, "revision", None), work)
            for key in MODEL_KEYS
            if getattr(section, key, None)
        }
        return replace(plugin, config=section.model_copy(update=update))

    steps = {"num_steps": RENDER_STEPS} if hasattr(resolved.renderer.config, "num_steps") else {}
    renderer = changed(resolved.renderer)
    renderer = replace(renderer, config=renderer.config.model_copy(update=steps))
    return replace(resolved, policy=changed(resolved.policy), renderer=renderer)


@contextmanager
def _models_without_weights(gpu: FakeGpu, depth: int | None) -> Iterator[None]:
    """Inside, `from_pretrained` reads a config file and makes weights without values."""
    from diffusers import ModelMixin
    from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

    from rl import model_files
    from rl.renderers.emu3_vq import emu3_vq_loop

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
        with gpu.loading():
            model = make(shortened(config), **known)
        place = options.get("device_map", {}).get("", "cpu")
        model = model.eval().to(place) if place != "cpu" else model.eval()
        return (model, {"missing_keys": []}) if options.get("output_loading_info") else model

    def of_diffusers(cls: Any, /, path: str = "", subfolder: str = "", **options: Any) -> Any:
        path = options.get("pretrained_model_name_or_path", path)
        config = cls.load_config(path, subfolder=subfolder)
        if depth and "num_layers" in cls._get_init_keys(cls):
            config = {**config, "num_layers": depth}
        with gpu.loading():
            model = cls.from_config(config)
            torch.nn.Module.to(model, options["torch_dtype"])  # diffusers' own `to` warns
        place = options.get("device_map", {}).get("", "cpu")
        return model.to(place) if place != "cpu" else model

    def of_emu3_vq(path: str, revision: str | None, original: bool, device: str) -> Any:
        from transformers import Emu3VQVAE, Emu3VQVAEConfig

        with gpu.loading():
            config = Emu3VQVAEConfig.from_pretrained(path)  # nosec B615 # a local folder
            tensors = Emu3VQVAE(config).state_dict()
        return {name: tensor.to(device) for name, tensor in tensors.items()}

    patch = mock.patch.object
    with ExitStack() as stack:
        for owner in (PreTrainedModel, AutoModelForImageTextToText):
            stack.enter_context(patch(owner, "from_pretrained", classmethod(of_transformers)))
        stack.enter_context(patch(ModelMixin, "from_pretrained", classmethod(of_diffusers)))
        stack.enter_context(patch(emu3_vq_loop, "_read_tensors", of_emu3_vq))
        stack.enter_context(patch(model_files, "require_finite", lambda named, owner: None))
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

    for num_pictures in range(max_pictures, -1, -1):
        if prompt := prompt_of(0, num_pictures):
            num_words = limit - len(prompt.token_ids)
            while num_words > 0:
                if longer := prompt_of(num_words, num_pictures):
                    return longer
                num_words = num_words * 9 // 10
            return prompt
    raise ValueError(
        f"policy.max_prompt_tokens = {limit} is too small for the prompt's fixed text; raise it"
    )


def _completion(policy: Policy, prompt: Prompt, num_tokens: int, rng: random.Random) -> Any:
    """A completion of `num_tokens` tokens; a few words and an image if the policy writes images."""
    text = " ".join(rng.choice("abcdefgh") for _ in range(num_tokens))
    completion = policy.encode_completion(text)
    ids = (*completion.token_ids[: num_tokens - 1], completion.token_ids[-1])
    vocabulary = policy.image_vocabulary
    if vocabulary is not None and prompt.grid is not None:
        height, width = (torch.tensor([side]) for side in prompt.grid)
        picture = [vocabulary.image]
        while picture[-1] != vocabulary.end_of_sequence:
            after = torch.tensor([len(picture) - 1])
            kind = int(image_grammar.grammar_ids(after, height, width, vocabulary))
            code = rng.randrange(vocabulary.visual_start, vocabulary.visual_end)
            picture.append(code if kind == image_grammar.VISUAL else kind)
        words = num_tokens - len(picture)
        ids = (*ids[: max(0, min(words, 8))], *picture)
    return replace(completion, token_ids=tuple(ids), logprobs=(0.0,) * len(ids))


class _StubReward(Reward):
    """Grades everything 0.5, in total and in every part that the config weights."""

    def __init__(self, parts: Sequence[str]) -> None:
        self._parts = parts

    def grade(self, reward_input: RewardInput) -> RewardOutput:
        return RewardOutput(0.5, parts=dict.fromkeys(self._parts, 0.5))


def _parts_of(config: RunConfig, name: str) -> list[str]:
    weights = config.final_reward.weights or {}
    return [key.partition("/")[2] for key in weights if key.startswith(f"{name}/")]
