"""Tiny stock pipelines of the real classes, whose random weights react to what they are conditioned
on; and jobs for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import tiny_qwen
import tiny_qwen3
import tiny_sd3
import torch
from diffusers import FlowMatchEulerDiscreteScheduler as Flow
from tiny_editor import make_stock
from tiny_models import draw
from tiny_pictures import make_picture
from tiny_qwen_image_21 import CHAT_TEMPLATE, ImageTextProcessor
from transformers import CLIPTextModel, SmolLM3Config, SmolLM3ForCausalLM

from rl.api.types import RenderJob, Sample
from rl.renderers.stock_pipeline_config import Config
from rl.renderers.stock_pipeline_loop import StockLoop, placed
from tiny_world.builder import klein_models

WORDS = ["make the sky blue", "add a red square to the image", "x"]
ONE_LAYER = {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16}


def tokenizer() -> Any:
    made = tiny_qwen.make_tokenizer()
    made.padding_side, made.chat_template = "right", CHAT_TEMPLATE
    return made


def klein() -> Any:
    words = tokenizer()
    vae, encoder = klein_models.make_vae(), klein_models.make_text_encoder(words)
    dit = klein_models.make_transformer()
    return klein_models.make_pipeline(draw(vae), draw(encoder), words, draw(dit))


def kontext() -> Any:
    """With the VAE, T5 and tokenizers of the tiny SD3."""
    parts = tiny_sd3.make_parts()
    clip = CLIPTextModel(parts.text_encoder.config)
    dit = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_attention_heads=2,
        joint_attention_dim=tiny_sd3.STATES_DIM,
        pooled_projection_dim=clip.config.hidden_size,
        guidance_embeds=True,
        axes_dims_rope=(4, 4, 8),
        **ONE_LAYER,
    )
    return diffusers.FluxKontextPipeline(
        Flow(use_dynamic_shifting=True),
        parts.vae,
        draw(clip),
        parts.tokenizer,
        parts.text_encoder_3,
        parts.tokenizer_3,
        draw(dit),
    )


def longcat() -> Any:
    words = tokenizer()
    processor = ImageTextProcessor(tiny_qwen.make_image_processor(), words, CHAT_TEMPLATE)
    dit = diffusers.LongCatImageTransformer2DModel(
        in_channels=64,
        num_attention_heads=2,
        joint_attention_dim=64,
        pooled_projection_dim=64,
        axes_dims_rope=[4, 4, 8],
        **ONE_LAYER,
    )
    vae = diffusers.AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        block_out_channels=[8] * 4,
        norm_num_groups=4,
        latent_channels=16,
        shift_factor=0.06,
        scaling_factor=1.5,
    )
    encoder = tiny_qwen.make_model(words)
    return diffusers.LongCatImageEditPipeline(
        Flow(use_dynamic_shifting=True), draw(vae), encoder, words, processor, draw(dit)
    )


def joy() -> Any:
    words = tokenizer()
    processor = ImageTextProcessor(
        tiny_qwen3.image_processor(64 * 64, 128 * 128), words, CHAT_TEMPLATE
    )
    dit = diffusers.JoyImageEditTransformer3DModel(
        patch_size=[1, 2, 2],
        in_channels=16,
        hidden_size=32,
        num_attention_heads=2,
        text_dim=64,
        num_layers=1,
        rope_dim_list=[4, 6, 6],
        theta=256,
    )
    vae = diffusers.AutoencoderKLWan(
        base_dim=8,
        z_dim=16,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
    )
    encoder = tiny_qwen3.make_model(words)
    return diffusers.JoyImageEditPipeline(Flow(), draw(vae), encoder, words, draw(dit), processor)


def fibo() -> Any:
    words = tokenizer()
    config = SmolLM3Config(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        pad_token_id=words.pad_token_id,
        bos_token_id=None,
        eos_token_id=words.eos_token_id,
    )
    encoder = SmolLM3ForCausalLM(config)
    dit = diffusers.BriaFiboTransformer2DModel(
        patch_size=1,
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=64,
        text_encoder_dim=32,
        axes_dims_rope=[0, 4, 4],
    )
    vae = diffusers.AutoencoderKLWan(
        base_dim=16,
        decoder_base_dim=16,
        dim_mult=[1, 2, 4, 4],
        in_channels=12,
        out_channels=12,
        is_residual=True,
        num_res_blocks=1,
        patch_size=2,
        scale_factor_spatial=16,
        scale_factor_temporal=4,
        temperal_downsample=[False, True, True],
        z_dim=16,
        latents_mean=[0.0] * 16,
        latents_std=[1.0] * 16,
    )
    return diffusers.BriaFiboEditPipeline(draw(dit), Flow(), draw(vae), draw(encoder), words)


def qwen_edit(cls: Any = diffusers.QwenImageEditPipeline) -> Any:
    parts, processor = make_stock(state_dim=64), tiny_qwen.make_processor()
    encoder = tiny_qwen.WithTokenTypes(tiny_qwen.make_model(processor.tokenizer))
    return cls(
        scheduler=parts.scheduler,
        vae=parts.vae,
        transformer=parts.transformer,
        text_encoder=encoder,
        tokenizer=processor.tokenizer,
        processor=processor,
    )


def sd3_edit() -> Any:
    return diffusers.StableDiffusion3Img2ImgPipeline(**tiny_sd3.make_parts().components)


SIZE = {"height_px": 64, "width_px": 64}
FEW_TOKENS = {"max_sequence_length": 64}
MAKERS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "BriaFiboEditPipeline": (fibo, {**SIZE, "arguments": {"guidance_scale": 1.0}}),
    "Flux2KleinPipeline": (
        klein,
        {**SIZE, "arguments": {**FEW_TOKENS, "text_encoder_out_layers": (0, 1, 2)}},
    ),
    "FluxKontextPipeline": (kontext, {**SIZE, "arguments": FEW_TOKENS}),
    "JoyImageEditPipeline": (joy, {"arguments": {"guidance_scale": 1.0}}),
    "LongCatImageEditPipeline": (longcat, {}),
    "QwenImageEditPipeline": (qwen_edit, {"arguments": {"true_cfg_scale": 1.0}}),
    "QwenImageEditPlusPipeline": (
        lambda: qwen_edit(diffusers.QwenImageEditPlusPipeline),
        {**SIZE, "arguments": {"true_cfg_scale": 1.0}},
    ),
    "StableDiffusion3Img2ImgPipeline": (
        sd3_edit,
        {**SIZE, "num_steps": 4, "arguments": {"strength": 0.7}},
    ),
}
"""Class -> a maker of a tiny one, keys of its config."""
OWN_SIZES = [
    ("longcat_image.pipeline_longcat_image_edit.calculate_dimensions", (64, 64)),
    ("joyimage.image_processor.find_best_bucket", (32, 32)),
    ("qwenimage.pipeline_qwenimage_edit.calculate_dimensions", (64, 64, None)),
    ("qwenimage.pipeline_qwenimage_edit_plus.calculate_dimensions", (64, 64)),
]
"""Functions by which pipelines choose a size near 1024^2, and what they shall return."""


def make_loop(name: str, pipeline: Any = None, **changes: Any) -> StockLoop:
    torch.manual_seed(0)
    maker, keys = MAKERS[name]
    options = {"dtype": "float32", "num_steps": 2, "batch_size": 4, **keys, **changes}
    config = Config(type="diffusers", model_path="tiny", pipeline=name, **options)
    return StockLoop(config, placed(pipeline or maker(), config, "cpu"))


def make_jobs(same_source: bool = True) -> list[RenderJob]:
    return [
        RenderJob(
            Sample(
                id="0" if same_source else str(i),
                instruction=words,
                sources=(make_picture(0 if same_source else i),),
            ),
            words,
            i,
        )
        for i, words in enumerate(WORDS)
    ]


def stock_arguments(name: str) -> dict[str, Any]:
    """Keywords of the stock call that draws what `make_loop(name)` draws, written out by hand."""
    keys = MAKERS[name][1]
    size = {"height": 64, "width": 64} if "height_px" in keys else {}
    more: dict[str, dict[str, Any]] = {
        "BriaFiboEditPipeline": {"_auto_resize": False},
        "FluxKontextPipeline": {"_auto_resize": False, "max_area": 64 * 64},
    }
    return {**size, **keys.get("arguments", {}), **more.get(name, {})}
