"""Creates models of real size with random weights on the device, without a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch

from benchmarks import our_worker, toy
from benchmarks.gpu_timing import Bench
from rl import build
from rl.api.policy import Policy
from rl.api.types import Prompt, Sample
from rl.config.schema import RunConfig
from rl.policies import qwen_vl
from rl.policies.attention import register
from rl.ranks.dist import Dist
from rl.renderers.qwen_image_config import MODULATIONS
from rl.renderers.qwen_image_loop import EditorParts, FrameVae
from rl.tools.gpu_checks import Setup

MAX_PICTURE_PX = 12_845_056
"""Qwen2.5-VL's `max_pixels`, which does not shrink 1024 x 1024 px: that picture has 1369 tokens."""
EXTRA_TEXT = "123"
"""Appended to the instructions of `toy.py`, so that prompts have `NUM_OTHER` other tokens."""
NUM_DROPPED, NUM_OTHER = 64, 110
"""Text tokens of a prompt: in front, not conditioning the transformer; the others."""
STD = 0.02


@dataclass(frozen=True)
class Size:
    """Sizes of models and measurements. A mapping has the config keys that are not defaults."""

    vocabulary: int
    language: Mapping[str, Any]
    vision: Mapping[str, Any]
    transformer: Mapping[str, Any]
    vae: Mapping[str, Any]
    policy_px: int
    """Side of the square picture that the policy reads."""
    render: tuple[tuple[int, int], ...]
    """(side of picture and source in px, batch size) of each forward of the transformer."""
    vae_px: tuple[int, ...]
    iteration: tuple[int, int]
    """(side of the pictures in px, denoising steps) of whole iterations."""
    group: int = 8
    completion_tokens: int = 256

    def num_prompt_tokens(self, side_px: int) -> int:
        """P: tokens of a prompt with a picture of that side."""
        return NUM_DROPPED + NUM_OTHER + round(side_px / 28) ** 2

    def num_conditioning_tokens(self, side_px: int) -> int:
        """Tokens that condition the transformer: picture, instruction, completion."""
        return self.num_prompt_tokens(side_px) - NUM_DROPPED + self.completion_tokens


REAL = Size(
    vocabulary=152064,
    language={
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "max_position_embeddings": 128000,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "mrope_section": [16, 24, 24],
        },
    },
    vision={
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
    transformer={},
    vae={},
    policy_px=1024,
    render=((1024, 1), (512, 4)),
    vae_px=(1024, 512),
    iteration=(512, 4),
)
"""Qwen2.5-VL-7B, and Qwen-Image-Edit, whose transformer and VAE are diffusers' defaults."""

TINY = Size(
    vocabulary=640,
    language=toy.LANGUAGE,
    vision=toy.VISION,
    transformer={
        "num_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": toy.LANGUAGE["hidden_size"],
        "axes_dims_rope": (4, 6, 6),
    },
    vae={"base_dim": 8, "num_res_blocks": 1},
    policy_px=56,
    render=((64, 1), (32, 2)),
    vae_px=(64,),
    iteration=(64, 2),
    group=3,
    completion_tokens=6,
)
"""Runs the same code in seconds on a CPU."""


def open_bench(setup: Setup) -> Bench:
    """Sizes and device of a case, with `policy/` in its folder."""
    bench = Bench(setup, TINY if setup.tiny else REAL, Dist.from_env(setup.device))
    save_policy_files(bench)
    return bench


# The policy


def save_policy_files(bench: Bench) -> None:
    """Writes `policy/`: tokenizer (REAL: with as many tokens as the released one), image processor
    and model config, but no weights."""
    from tiny_world.builder.language import qwen_config

    size = bench.size
    tokenizer = toy.make_tokenizer(num_tokens=min(size.vocabulary, 151_665))
    language = {"vocab_size": size.vocabulary, **size.language}
    config = qwen_config(tokenizer, language, dict(size.vision))
    config.architectures = ["Qwen2_5_VLForConditionalGeneration"]
    for part in (tokenizer, toy.make_image_processor(), config):
        part.save_pretrained(bench.folder / "policy")


def random_policy_model(bench: Bench, dtype: str, attention: str) -> Any:
    """`Qwen2_5_VLForConditionalGeneration` on the device, without adapter; `attention`: the kernel
    of its language model, by transformers' name."""
    from transformers import AutoConfig, Qwen2_5_VLForConditionalGeneration

    config = AutoConfig.from_pretrained(bench.folder / "policy")  # nosec B615 # a local folder
    with torch.device(bench.device):
        model = Qwen2_5_VLForConditionalGeneration._from_config(
            config,
            dtype=getattr(torch, dtype),
            attn_implementation={"text_config": attention, "vision_config": "sdpa"},
        )
    return model.eval()


def make_policy(bench: Bench, config: RunConfig) -> Policy:
    """The policy that a run builds, but with random weights."""

    def load_model(section: Any) -> Any:
        return random_policy_model(bench, section.dtype, register())

    with mock.patch.object(qwen_vl, "load_model", load_model), unchecked_files():
        return build.build_policy(build.resolve(config), bench.dist)


def unchecked_files() -> AbstractContextManager[object]:
    """In this context no model files are checked: no weights and no editor are on disk."""
    return mock.patch.object(build, "model_problems", lambda models: ())


def run_config(
    bench: Bench,
    side_px: int,
    *,
    num_steps: int = 8,
    api_base: str = "",
    policy: Mapping[str, Any] | None = None,
    optimizer: Mapping[str, Any] | None = None,
    **changes: Any,
) -> RunConfig:
    """`our_worker.config_of` at this size: pictures of `side_px`, two groups per iteration.
    `api_base`: the judge's URL, '' if it is not asked; `policy`, `optimizer`: keys to set in these
    sections; `changes`: top-level keys, so a section is replaced as a whole."""
    values = our_worker.config_of(
        bench.folder, shape_of(bench, side_px, num_steps), api_base, bench.folder / "runs"
    )
    values["policy"] |= {"dtype": bench.dtype, "image_max_pixels": MAX_PICTURE_PX, **(policy or {})}
    values["renderer"] |= {"dtype": bench.dtype}
    values["optimizer"] |= {"gradient_checkpointing": "mlp", **(optimizer or {})}
    return RunConfig.model_validate(values | changes)


def shape_of(bench: Bench, side_px: int, num_steps: int = 8) -> toy.Shape:
    """The `toy.Shape` of this size."""
    return toy.Shape(
        group=bench.size.group,
        num_groups=2,
        picture_px=side_px,
        completion_tokens=bench.size.completion_tokens,
        render_px=side_px,
        num_steps=num_steps,
    )


def make_sample(bench: Bench, side_px: int, index: int) -> Sample:
    """A sample of `toy.py`, with as many text tokens as a prompt of the released editor."""
    sample = toy.make_sample(index, shape_of(bench, side_px))
    return replace(sample, instruction=sample.instruction + EXTRA_TEXT)


def make_group(
    bench: Bench, policy: Policy, side_px: int, index: int = 0
) -> tuple[Prompt, list[tuple[int, ...]]]:
    """A prompt with its picture, and the ids of its completions."""
    sample = make_sample(bench, side_px, index)
    texts = toy.make_completions(sample.instruction, shape_of(bench, side_px))
    return policy.build_prompt(sample), [policy.encode_completion(t).token_ids for t in texts]


# The editor


@contextmanager
def create_on(device: str, dtype: str) -> Iterator[None]:
    """In this context modules are created directly on that device and in that dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def fill(model: torch.nn.Module) -> Any:
    """Draws matrices from a normal distribution; leaves norms unchanged."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.squeeze().ndim > 1:
                parameter.normal_(0, STD)
    return model.eval().requires_grad_(False)


def random_transformer(bench: Bench) -> Any:
    """QwenImageTransformer2DModel with all weights on the device, where diffusers needs them."""
    from diffusers import QwenImageTransformer2DModel

    with create_on(bench.device, bench.dtype):
        return fill(QwenImageTransformer2DModel(**bench.size.transformer))


def modulation_to_host(transformer: Any) -> None:
    """Moves the modulation weights to host memory, where they are in a run."""
    for block in transformer.transformer_blocks:
        for name in MODULATIONS:
            getattr(block, name).to("cpu")


def random_vae(bench: Bench) -> Any:
    """diffusers' AutoencoderKLQwenImage."""
    from diffusers import AutoencoderKLQwenImage

    with create_on(bench.device, bench.dtype):
        return fill(AutoencoderKLQwenImage(**bench.size.vae))


def editor_parts(bench: Bench) -> EditorParts:
    """The editor's parts, on the devices where `load_parts` puts them."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    from tiny_world.builder.models import SCHEDULER

    transformer = random_transformer(bench)
    modulation_to_host(transformer)
    scheduler = FlowMatchEulerDiscreteScheduler(**SCHEDULER)
    return EditorParts(transformer, FrameVae(random_vae(bench)).eval(), scheduler)


def random_klein(folder: str, device: str, dtype: str) -> Any:
    """A `Flux2KleinPipeline` with the configs and the tokenizer of `folder`; its weights are drawn
    on the device and are then in host memory."""
    from diffusers import AutoencoderKLFlux2, Flux2KleinPipeline, Flux2Transformer2DModel
    from transformers import AutoConfig, Qwen3ForCausalLM

    text_config = AutoConfig.from_pretrained(folder, subfolder="text_encoder")  # nosec B615 # local
    parts: dict[str, torch.nn.Module] = {}
    with create_on(device, dtype):
        parts["text_encoder"] = fill(Qwen3ForCausalLM(text_config)).cpu()
        for name, cls in (("transformer", Flux2Transformer2DModel), ("vae", AutoencoderKLFlux2)):
            parts[name] = fill(cls.from_config(cls.load_config(folder, subfolder=name))).cpu()
    return Flux2KleinPipeline.from_pretrained(folder, **parts)  # nosec B615 # a local folder
