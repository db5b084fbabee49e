"""Steps of `rl check-gpu`: peak memory of released model sizes, with random weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch

from rl import build
from rl.api.types import TrainSequence
from rl.check_gpu.gpu_renderers import edit_step, small_parts, step_21
from rl.check_gpu.lines import Asked, Line, result
from rl.config.schema import load_config
from rl.learner.learner import Learner
from rl.memory import footprint, memory_plan
from rl.policies.qwen_vl import qwen_vl_loading
from rl.policies.shared.packed_attention import register
from rl.ranks.dist import Dist
from rl.renderers.qwen_image.denoising_config import MODULATIONS
from rl.renderers.qwen_image.modulation import move_without_modulation

MAX_RATIO = 1.1
"""Limit on the peak divided by the plan, which leaves a tenth of the GPU free."""
ENV = {"APP__RUN_NAME": "check", "APP__BASE_EXP_DIR": ".", "APP__REWARD_FUNCTION_API_BASE": "none"}
SIDE_TOKENS, MODEL_SIZE = 64, dict[str, Any]()
"""Tokens per side of 1024 x 1024 px; arguments of the released transformers: their defaults."""
LANGUAGE = {"vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944}
LANGUAGE |= {"num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4}
LANGUAGE |= {"max_position_embeddings": 128000}
ROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
VISION: dict[str, Any] = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
}
VISION |= {"out_hidden_size": 3584, "fullatt_block_indexes": [7, 15, 23, 31]}
"""`LANGUAGE`, `ROPE` and `VISION`: config values of Qwen2.5-VL-7B."""


def reset_peak(device: str) -> None:
    """Starts a new peak of memory, from what is allocated now."""
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_gb(device: str) -> float:
    return torch.cuda.max_memory_allocated(device) / 1e9


def against_plan(what: str, device: str, plan_gb: float, fix: str, keys: dict[str, str]) -> Line:
    measured_gb, fix = peak_gb(device), f"{fix}; report it with an issue"
    note = f"peak {measured_gb:.1f} GB, planned {plan_gb:.1f}"
    return result(what, measured_gb <= MAX_RATIO * plan_gb, note, fix, keys)


@torch.no_grad()
def _transformer(asked: Asked, small: str, released: str, step: Any) -> Iterator[Line]:
    """A denoising step on the rows of the released config's batch, two per picture if guided."""
    resolved = build.resolve(load_config(f"configs/{released}.jsonnet", (), ENV))
    renderer = resolved.renderer
    kind = type(small_parts(asked, small).transformer)
    torch.set_default_dtype(getattr(torch, asked.dtype))
    with torch.device(asked.device):
        transformer = kind(**MODEL_SIZE).eval()
    torch.set_default_dtype(torch.float32)
    for parameter in transformer.parameters():
        if parameter.ndim > 1:
            parameter.normal_(0, 0.02)
    if released == "qwen_image_edit":  # as in a run: modulation, a third, stays in host memory
        for block in transformer.transformer_blocks:
            for name in MODULATIONS:
                getattr(block, name).to("cpu")
        move_without_modulation(transformer, asked.device)
    reset_peak(asked.device)
    batch = renderer.config.batch_size
    num_rows = batch * (2 if renderer.config.true_cfg_scale > 1 else 1)
    forward = step(transformer, SIDE_TOKENS, [300 + 13 * row for row in range(num_rows)])
    finite = bool(forward().isfinite().all())
    what = f"real size, {renderer.name}"
    yield result(f"{what}, {num_rows} rows", finite, "finite velocities", "use another GPU")
    weights, activations = (
        counts(renderer.config)["transformer"]
        for counts in (renderer.cls.parameter_counts, renderer.cls.activation_counts)
    )
    plan_gb = (weights + activations) * footprint.BYTES[asked.dtype] / 1e9
    half = str(max(1, batch // 2))
    fix, keys = f"set renderer.batch_size={half}", {"renderer.batch_size": half}
    yield against_plan(f"{what}, memory", asked.device, plan_gb, fix, keys)


edit = partial(_transformer, small="quickstart", released="qwen_image_edit", step=edit_step)
image_21 = partial(_transformer, small="tiny_qwen_image_21", released="qwen_image_21", step=step_21)


def policy(asked: Asked) -> Iterator[Line]:
    """Forward, backward and optimizer step on one group of the released config, with the tokenizer
    of the quickstart's small policy."""
    path, *small = asked.words("quickstart")
    folder = load_config(path, small).policy["model_path"]
    words = ["world_size=1", "prompts_per_iteration=1", f"policy.dtype={asked.dtype}"]
    released = load_config("configs/qwen_image_edit.jsonnet", words, ENV)
    words += [f"policy.model_path={folder}", "policy.init_text_encoder_from="]
    # The small policy's image processor makes a token of 16 x 16 px, so this area has about 1370
    # tokens, as 1024 x 1024 px have in the released model.
    area_px = 592**2
    words += [f"renderer.policy_image_area_px={area_px}", f"policy.image_max_pixels={area_px}"]
    words += ["policy.max_prompt_tokens=2048"]
    config = load_config("configs/qwen_image_edit.jsonnet", words, ENV)
    dist = Dist.from_env(asked.device)
    with mock.patch.object(qwen_vl_loading, "load_model", partial(_random, asked.device)):
        built: Any = build.build_policy(build.resolve(config), dist)
    small_config = build.resolve(load_config(path, small))
    [source] = build.build_data(small_config, small_config.train)
    prompt = built.build_prompt(source[0])
    num_tokens, group = config.sampling.max_completion_tokens, config.generations_per_prompt
    ids_G = [[(5 + g + t) % 200 for t in range(num_tokens)] for g in range(group)]
    reset_peak(asked.device)
    step = Learner(built, config, dist, num_iterations=10).begin(0, [prompt], [ids_G], [group])
    for micro_batch in step.micro_batches:
        batch, outputs = step.forward(micro_batch)
        built.decode_actions(micro_batch.rows, batch, outputs)
        del batch, outputs
    step.prefetch_reference(lambda: True)
    all_T, logprobs_T = (True,) * num_tokens, (-1.0,) * num_tokens
    step.accumulate(0, [TrainSequence(all_T, g % 2 - 0.5, logprobs_T) for g in range(group)])
    step.step()
    what = f"real size, policy, a group of {group} x {num_tokens} tokens"
    finite = all(bool(p.isfinite().all()) for p in built.module.parameters())
    yield result(what, finite, f"prompt of {len(prompt.token_ids)} tokens", "use another GPU")
    sizes = footprint.sizes(build.resolve(released))
    assert sizes is not None
    tokens = len(prompt.token_ids) + group * num_tokens
    sizes = replace(sizes, forward_tokens=tokens, kept_tokens=tokens, engine=None, frozen=[])
    plan_gb = memory_plan.plan(sizes, asked.gpu_gb).peak_gb - memory_plan.CONTEXT_GB
    key = "optimizer.gradient_checkpointing"
    yield against_plan(
        "real size, policy, memory", asked.device, plan_gb, f"set {key}=true", {key: "true"}
    )


def _random(device: str, section: Any) -> Any:
    """The released model with random weights, on the device."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(section.model_path)  # nosec B615 # a local folder
    for part, values in ((config.text_config, LANGUAGE), (config.vision_config, VISION)):
        for name, value in values.items():
            setattr(part, name, value)
    config.text_config.rope_parameters = ROPE
    config.text_config.layer_types = ["full_attention"] * LANGUAGE["num_hidden_layers"]
    kernels = {"text_config": register(), "vision_config": "sdpa"}
    with torch.device(device):
        return AutoModelForImageTextToText.from_config(
            config, dtype=getattr(torch, section.dtype), attn_implementation=kernels
        ).eval()
