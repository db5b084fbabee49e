"""A tiny Qwen-Image-2.1 of the real classes, with the Qwen3-VL of its stock pipeline.

Random weights are so large that text and pictures have an effect.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache
from typing import Any

import tiny_editor
import tiny_qwen
import tiny_qwen3
import torch
from diffusers import AutoencoderKLQwenImage21, FlowMatchEulerDiscreteScheduler, QwenImage21Pipeline
from PIL import Image
from tiny_models import draw
from tiny_pictures import make_picture
from transformers import Qwen3VLProcessor
from transformers.processing_utils import ProcessorMixin

from rl.api.types import HiddenStates, RenderJob, Sample
from rl.renderers.qwen_image_21_config import Config
from rl.renderers.qwen_image_21_loop import QwenImage21Loop
from rl.renderers.qwen_image_config import condition_sizes
from rl.renderers.qwen_image_loop import EditorParts, PictureVae
from tiny_world.builder.image21_models import make_transformer
from tiny_world.builder.image21_tokenizer import image_processor
from tiny_world.builder.tokenizer import CHAT_TEMPLATE

STATE_DIM = 64
SIDE_PX = 64
TINY = {
    "type": "qwen_image_21",
    "model_path": "tiny/qwen-image-2.1",
    "dtype": "float32",
    "num_steps": 4,
    "output_area_px": SIDE_PX**2,
    "condition_area_px": SIDE_PX**2,
    "policy_image_area_px": SIDE_PX**2,
}
WORDS = ("make the sky blue", "add a red square to the image now", "x")


class ImageTextProcessor(Qwen3VLProcessor):
    """Qwen3-VL's processor without its video processor, which needs another library.
    (ProcessorMixin reads the attributes from this signature.)"""

    def __init__(self, image_processor: Any, tokenizer: Any, chat_template: str) -> None:
        for name in ("image", "video", "vision_start", "vision_end"):
            token = f"<|{name}_pad|>" if name in ("image", "video") else f"<|{name}|>"
            setattr(self, f"{name}_token", token)
            setattr(self, f"{name}_token_id", tokenizer.convert_tokens_to_ids(token))
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)

    @property
    def model_input_names(self) -> list[str]:
        names = self.tokenizer.model_input_names + self.image_processor.model_input_names
        return [*names, "mm_token_type_ids"]


class StockParts(tiny_editor.StockParts):
    """Stock parts with the VAE of Qwen-Image-2.1."""

    def ours(self) -> EditorParts:
        vae = PictureVae(copy.deepcopy(self.vae)).requires_grad_(False)
        return EditorParts(copy.deepcopy(self.transformer), vae, self.scheduler)


def make_parts() -> EditorParts:
    return make_stock().ours()


def make_stock() -> StockParts:
    torch.manual_seed(1)
    sizes = {"channels": 8, "head_dim": 16, "text_width": STATE_DIM}
    transformer = draw(make_transformer(3, **sizes), vectors_std=0.3)
    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, base_shift=0.5, max_shift=1.15, max_image_seq_len=4096
    )
    return StockParts(transformer.requires_grad_(False), make_vae(), scheduler)


def make_vae(patched: bool = False) -> Any:
    """Downsamples 16x to 8 channels; `patched`: folds 2x2 px into channels, then halves 3 times."""
    folded = {"patch_size": 2, "in_channels": 16, "out_channels": 16} if patched else {}
    return AutoencoderKLQwenImage21(
        base_dim=8,
        decoder_base_dim=8,
        z_dim=8,
        dim_mult=[1, 2, 2, 2] if patched else [1, 2, 2, 2, 2],
        temperal_downsample=[False, True, True] if patched else [False, True, True, True],
        num_res_blocks=1,
        latents_mean=[0.1 * i for i in range(8)],
        latents_std=[1.2 - 0.1 * i for i in range(8)],
        **folded,
    ).eval()


@cache
def make_encoder() -> tuple[Any, Any]:
    """(a Qwen3-VL, its processor)."""
    tokenizer = tiny_qwen.make_tokenizer()
    model = tiny_qwen3.make_model(tokenizer).requires_grad_(False)
    return model, ImageTextProcessor(image_processor(), tokenizer, CHAT_TEMPLATE)


def stock_pipeline(parts: StockParts) -> Any:
    encoder, processor = make_encoder()
    pipeline = QwenImage21Pipeline(
        FlowMatchEulerDiscreteScheduler.from_config(parts.scheduler.config),
        parts.vae,
        encoder,
        processor,
        parts.transformer,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def render_stock(parts: StockParts, jobs: Sequence[RenderJob], **more: Any) -> torch.Tensor:
    """[B, 4, H, W] in 0..1: the stock pipeline's pictures, drawn one by one, because its own
    batches differ by 0.4."""
    pictures = [
        stock_pipeline(parts)(
            job.sample.instruction,
            image=list(job.sample.sources) or None,
            generator=torch.Generator().manual_seed(job.noise_seed),
            output_type="pt",
            **{"num_inference_steps": 4, "output_resolution": SIDE_PX, **more},
        ).images
        for job in jobs
    ]
    return torch.cat(pictures)


@torch.no_grad()
def encode(words: str, sources: Sequence[Image.Image]) -> tuple[torch.Tensor, tuple[range, ...]]:
    """(states [L, STATE_DIM] before the last norm, the pictures' positions), without the system's
    turn, from the stock pipeline."""
    job = RenderJob(Sample("s", words, sources=tuple(sources)), None, 0)
    sizes = condition_sizes(Config(**TINY), job)
    images = [
        source.convert("RGBA").resize(size, Image.Resampling.LANCZOS)
        for source, size in zip(sources, sizes, strict=True)
    ]
    pipeline = QwenImage21Pipeline(None, None, *make_encoder(), None)
    [states], _, [is_picture] = pipeline._get_qwen_prompt_embeds(words, images or None)
    positions, start = [], 0
    for width, height in sizes:
        start = is_picture.tolist().index(True, start)
        positions.append(range(start, start + width * height // 32**2))
        start = positions[-1].stop
    return states, tuple(positions)


def make_group(
    words_G: Sequence[str],
    sources: Sequence[Image.Image],
    first_seed: int = 0,
    negative: str | None = None,
) -> list[RenderJob]:
    """The jobs of a policy with the stock pipeline's encoder. Seeds count up.

    All members' states of the prompt are copies of the first one's, as from one packed forward: the
    renderer processes the sources of several rows once only if their first states are bit-equal,
    and separate forwards may round differently.
    """
    first, positions = encode(words_G[0], sources)
    start = first[: positions[-1].stop if positions else 0]

    def states_of(words: str) -> torch.Tensor:
        return torch.cat([start, encode(words, sources)[0][len(start) :]])

    negative_states = None if negative is None else states_of(negative)
    return [
        RenderJob(
            Sample("s", words, sources=tuple(sources)),
            HiddenStates(states_of(words), negative_states, positions),
            first_seed + g,
        )
        for g, words in enumerate(words_G)
    ]


def make_job(words: str = WORDS[0], sources: Sequence[Image.Image] = ()) -> RenderJob:
    [job] = make_group([words], sources, 3)
    return job


def make_renderer(parts: EditorParts, **changes: object) -> QwenImage21Loop:
    return QwenImage21Loop(Config(**{**TINY, **changes}), parts)


def references(number: int) -> list[Image.Image]:
    """`number` sources of different sizes; the last one decides the size of the result."""
    sizes = [(96, 64), (64, 64), (64, 128)]
    return [make_picture(i, *sizes[i]) for i in range(number)]
