"""A tiny Qwen-Image editor of the real classes; its random weights react to the conditioning."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, QwenImageEditPipeline
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus
from PIL import Image
from tiny_models import draw
from tiny_pictures import as_floats, make_picture
from tiny_rounding import PICTURE_TOL

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


def use_small_conditions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the stock pipelines resize sources to 64^2 px instead of 1024^2, for speed."""
    for module in (pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus):
        original = module.calculate_dimensions
        monkeypatch.setattr(
            module,
            "calculate_dimensions",
            lambda area, ratio, original=original: original(SMALL_AREA_PX, ratio),
        )


def render_stock(
    stock: StockParts,
    jobs: Sequence[RenderJob],
    pipeline_class: type = QwenImageEditPipeline,
    **arguments: object,
) -> torch.Tensor:
    """[B, 3, H, W] in 0..1: pictures of the stock pipeline with noise of the jobs' seeds. Jobs of
    one source, or a single job of several."""
    embeds, mask = pad_states([job.payload.embeds for job in jobs])
    if arguments.get("true_cfg_scale", 1.0) > 1:
        negatives = pad_states([job.payload.negative_embeds for job in jobs])
        arguments["negative_prompt_embeds"], arguments["negative_prompt_embeds_mask"] = negatives
    pictures: torch.Tensor = stock_pipeline(stock, pipeline_class)(
        image=[source for job in jobs for source in job.sample.sources],
        prompt_embeds=embeds,
        prompt_embeds_mask=mask,
        generator=[torch.Generator().manual_seed(job.noise_seed) for job in jobs],
        output_type="pt",
        **{"num_inference_steps": 4, "true_cfg_scale": 1.0, **arguments},
    ).images
    return pictures


def make_states(seed: int, length: int) -> torch.Tensor:
    """[length, STATE_DIM] float32."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(length, STATE_DIM, generator=generator)


def make_job(
    source: Image.Image | None,
    length: int,
    noise_seed: int,
    *,
    states_seed: int = 0,
    negative_length: int | None = None,
) -> RenderJob:
    negative = None if negative_length is None else make_states(1000, negative_length)
    payload = HiddenStates(make_states(states_seed, length), negative_embeds=negative)
    sample = Sample(id=f"sample-{states_seed}", instruction="", sources=(source,) if source else ())
    return RenderJob(sample=sample, payload=payload, noise_seed=noise_seed)


def pad_states(states_B: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Pads by plain loops, independently of the renderer's padding."""
    longest = max(len(states) for states in states_B)
    padded = torch.zeros(len(states_B), longest, STATE_DIM)
    mask = torch.zeros(len(states_B), longest, dtype=torch.long)
    for row, states in enumerate(states_B):
        padded[row, : len(states)] = states
        mask[row, : len(states)] = 1
    return padded, mask


def make_renderer(parts: EditorParts, **changes: object) -> QwenImageLoop:
    return QwenImageLoop(QwenImageEdit.Config(**{**TINY, **changes}), parts)


def render_floats(renderer: QwenImageLoop, jobs: Sequence[RenderJob]) -> torch.Tensor:
    """[B, 3, H, W] in 0..1; all jobs in one batch."""
    (bucket,) = {renderer.bucket_of(renderer.config, job) for job in jobs}
    return as_floats(renderer.render_tensor(jobs, bucket))


def three_jobs(width: int = 64, height: int = 64) -> list[RenderJob]:
    return [
        make_job(
            make_picture(seed, width, height),
            length,
            noise_seed=seed,
            states_seed=seed,
            negative_length=5 + seed,
        )
        for seed, length in enumerate((9, 14, 11))
    ]


def assert_same_picture(left: object, right: object) -> None:
    """Equal except for roundings to another byte, which float32 noise between batches causes."""
    assert isinstance(left, Image.Image)
    assert isinstance(right, Image.Image)
    difference = np.asarray(left, dtype=int) - np.asarray(right, dtype=int)
    assert np.abs(difference).max() <= 1
    assert (difference != 0).mean() <= 255 * PICTURE_TOL
