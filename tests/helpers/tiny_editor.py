"""A tiny Qwen-Image editor of the real classes; its random weights react to the conditioning."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, QwenImageEditPipeline
from PIL import Image
from tiny_models import draw
from tiny_pictures import make_picture
from tiny_rounding import PICTURE_TOL
from torch.nn.utils.rnn import pad_sequence

from rl.api.types import HiddenStates, RenderJob, Sample
from rl.renderers.qwen_image_edit import QwenImageEdit
from rl.renderers.qwen_image_loop import EditorParts, FrameVae, QwenImageLoop
from tiny_world.builder.models import SCHEDULER, make_transformer, make_vae

STATE_DIM = 32
SMALL_AREA_PX = 64 * 64
TINY = {
    "type": "qwen_image_edit",
    "model_path": "tiny/editor",
    "dtype": "float32",
    "num_steps": 4,
    "true_cfg_scale": 1.0,
    "output_area_px": SMALL_AREA_PX,
    "condition_area_px": SMALL_AREA_PX,
}


@dataclass(frozen=True)
class StockParts:
    """diffusers' modules for the stock pipelines."""

    transformer: Any
    vae: Any
    scheduler: Any

    def ours(self) -> EditorParts:
        """Copies of the weights for this project's render loop."""
        vae = FrameVae(copy.deepcopy(self.vae))
        return EditorParts(copy.deepcopy(self.transformer), vae, self.scheduler)

    def save(self, folder: Path) -> None:
        """Writes the folder layout of the released checkpoints."""
        for name, part in vars(self).items():
            part.save_pretrained(folder / name)


def make_parts() -> EditorParts:
    return make_stock().ours()


def make_stock(zero_cond_t: bool = False, state_dim: int = STATE_DIM) -> StockParts:
    torch.manual_seed(0)
    sizes = {"channels": 4, "heads": 2, "head_dim": 16, "text_width": state_dim}
    transformer = make_transformer(2, **sizes, zero_cond_t=zero_cond_t)
    vae = make_vae([0.1, -0.2, 0.3, 0.0], [1.3, 0.7, 1.1, 0.9]).eval()
    return StockParts(draw(transformer), vae, FlowMatchEulerDiscreteScheduler(**SCHEDULER))


def stock_pipeline(
    parts: StockParts, pipeline_class: type = QwenImageEditPipeline, processor: Any = None
) -> Any:
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(parts.scheduler.config)
    pipeline = pipeline_class(
        scheduler=scheduler,
        vae=parts.vae,
        transformer=parts.transformer,
        text_encoder=None,
        tokenizer=processor and processor.tokenizer,
        processor=processor,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def render_stock(
    stock: StockParts,
    jobs: Sequence[RenderJob],
    pipeline_class: type = QwenImageEditPipeline,
    area_px: int = SMALL_AREA_PX,
    **arguments: object,
) -> torch.Tensor:
    """[B, 3, H, W] in 0..1: pictures of the stock pipeline with noise of the jobs' seeds. Jobs of
    one source, or a single job of several; sources are resized to `area_px`, for speed less than
    stock's 1024^2."""
    embeds, mask = pad_states([job.payload.embeds for job in jobs])
    if arguments.get("true_cfg_scale", 1.0) > 1:
        negatives = pad_states([job.payload.negative_embeds for job in jobs])
        arguments["negative_prompt_embeds"], arguments["negative_prompt_embeds_mask"] = negatives
    module = sys.modules[pipeline_class.__module__]
    size_of = module.calculate_dimensions
    with patch.object(module, "calculate_dimensions", lambda _, ratio: size_of(area_px, ratio)):
        pictures: torch.Tensor = stock_pipeline(stock, pipeline_class)(
            image=[source for job in jobs for source in job.sample.sources],
            prompt_embeds=embeds.to(stock.transformer.dtype),
            prompt_embeds_mask=mask,
            generator=[torch.Generator().manual_seed(job.noise_seed) for job in jobs],
            output_type="pt",
            **{"num_inference_steps": 4, "true_cfg_scale": 1.0, **arguments},
        ).images
    return pictures


def make_states(seed: int, length: int) -> torch.Tensor:
    """[length, STATE_DIM] float32."""
    return torch.randn(length, STATE_DIM, generator=torch.Generator().manual_seed(seed))


def make_job(
    source: Image.Image | None,
    length: int,
    noise_seed: int = 0,
    *,
    states_seed: int = 0,
    negative_length: int | None = None,
) -> RenderJob:
    negative = None if negative_length is None else make_states(1000, negative_length)
    payload = HiddenStates(make_states(states_seed, length), negative_embeds=negative)
    sample = Sample(id=f"sample-{states_seed}", instruction="", sources=(source,) if source else ())
    return RenderJob(sample=sample, payload=payload, noise_seed=noise_seed)


def pad_states(states_B: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """[B, L, STATE_DIM] and its mask [B, L]; the renderer pads nothing."""
    masks = [torch.ones(len(states), dtype=torch.long) for states in states_B]
    return pad_sequence(list(states_B), True), pad_sequence(masks, True)


def make_renderer(parts: EditorParts, **changes: object) -> QwenImageLoop:
    return QwenImageLoop(QwenImageEdit.Config(**{**TINY, **changes}), parts)


def three_jobs(width: int = 64) -> list[RenderJob]:
    """Two adjacent texts are equally long."""
    return [
        make_job(make_picture(i, width), length, i, states_seed=i, negative_length=5 + i)
        for i, length in enumerate((9, 14, 14))
    ]


def assert_same_picture(left: object, right: object) -> None:
    """Equal except for roundings to another byte, which float32 noise between batches causes."""
    assert isinstance(left, Image.Image)
    assert isinstance(right, Image.Image)
    difference = np.asarray(left, dtype=int) - np.asarray(right, dtype=int)
    assert np.abs(difference).max() <= 1
    assert (difference != 0).mean() <= 255 * PICTURE_TOL
