"""Computes how long an iteration and a run of the shipped configs for real models take.

    python -m benchmarks.run_hours

Nothing is timed: FLOPs of `rl/meter/flops.py` and `benchmarks/picture_flops.py` are divided by
`EFFICIENCY` of a GPU's rate. Start, held-out evaluations and checkpoints are left out.
"""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any, NamedTuple

from benchmarks.flop_counter import flops_of
from benchmarks.picture_flops import META, TOKENS_OF_PLUS, edit, image_21
from rl import build
from rl.build import Resolved
from rl.config.schema import load_config
from rl.memory import footprint, memory_plan
from rl.memory.memory_plan import PHASES, Sizes
from rl.meter.flops import LanguageModel, ModelShape, prefix_tree_pairs

EFFICIENCY = 0.4
"""Assumed share of a GPU's FLOP rate and memory bandwidth that a run reaches."""
COMPLETION_SHARE = 0.5
"""Assumed mean length of a completion divided by its limit, for all policies but Emu3."""
EMU3_TOKENS = 1065
"""Length of Emu3's completion, which is a picture."""
VOCABULARY = 151_936
PATCHES_PER_TOKEN = 4
"""Patches that the vision tower merges into one token."""
PCIE_BYTES_S = 20e9
JUDGE_FLOPS = 2 * 73.4e9 * 2000
"""FLOPs of a question to Qwen2.5-VL-72B: about 2,000 tokens of pictures, question and reply."""
JUDGE_GPUS = 4


class Gpu(NamedTuple):
    """Dense bfloat16 FLOPs and bytes of memory per second."""

    name: str
    flops: float
    bandwidth: float


RTX_4090 = Gpu("RTX 4090", 165e12, 1.0e12)
L40S = Gpu("L40S", 362e12, 0.86e12)
H100 = Gpu("H100", 790e12, 3.35e12)
H200 = Gpu("H200", 790e12, 4.8e12)
RUNS = {
    "one_gpu_24gb": (RTX_4090, 7600),
    "one_gpu_48gb": (L40S, 192),
    "one_gpu_80gb": (H100, 499),
    "vlm_reasoning": (H100, 7600),
    "prompt_enhancement": (H100, 192),
    "qwen_image_21_fewstep": (H100, 499),
    "qwen_image_21": (H100, 499),
    "qwen_image_edit_fewstep": (H200, 499),
    "qwen_image_edit_plus": (H200, 499),
    "qwen_image_edit": (H200, 499),
    "sft_s__rl_sc": (H100, 0),
}
"""Config -> (GPU, number of training samples; 0: the config gives the number of iterations)."""
ENVIRONMENT = {
    "APP__BASE_EXP_DIR": "runs",
    "APP__RUN_NAME": "any",
    "APP__REWARD_FUNCTION_API_BASE": "http://judge:4877",
    "APP__DATA_DIR": "any",
}


def sampling_s(sizes: Sizes, length: float, gpu: Gpu, gpu_gb: float) -> float:
    """Seconds in which a rank's engine samples an iteration's completions, sleeps and wakes."""
    planned = memory_plan.plan(sizes, gpu_gb)
    engine = planned.inference
    assert engine is not None and planned.engine is not None
    at_once = min(sizes.num_completions, engine.max_num_seqs, int(engine.at_once(gpu_gb)))
    num_steps = math.ceil(sizes.num_completions / at_once) * length
    tokens = sizes.prompt_tokens + length / 2
    num_bytes = engine.weights_gb * 1e9 + at_once * tokens * engine.kv_bytes
    step_s = max(num_bytes / gpu.bandwidth, at_once * 2 * sizes.model.params / gpu.flops)
    asleep_s = 2 * engine.weights_gb * 1e9 / PCIE_BYTES_S
    sleeps = planned.engine.phases != PHASES
    return num_steps * step_s / EFFICIENCY + (asleep_s if sleeps else 0)


def policy_flops(resolved: Resolved, sizes: Sizes, length: float) -> float:
    """FLOPs of the policy in an iteration of a rank: vision tower, prefill, reference, training."""
    config = resolved.config
    shape = {field.name: getattr(sizes.model, field.name) for field in fields(ModelShape)}
    rank, modules = sizes.lora_rank or 0, tuple(sizes.lora_modules)
    model = LanguageModel(**shape, vocabulary=VOCABULARY, lora_rank=rank, lora_targets=modules)
    prompt, lengths = sizes.prompt_tokens, [int(length)] * config.generations_per_prompt
    tokens, pairs = prompt + sum(lengths), prefix_tree_pairs(prompt, lengths)
    head = model.head_flops(sum(lengths))
    forward = model.forward_flops(tokens, pairs) + head
    mlps = 6 * model.num_layers * model.width * model.mlp_width * tokens
    recomputed = {False: 0.0, "mlp": mlps, True: forward}[sizes.checkpointing]
    flops = forward + recomputed + model.backward_flops(tokens, pairs) + (1 if rank else 2) * head
    flops += forward * (config.algorithm.kl_coeff > 0)
    flops += model.forward_flops(prompt, prefix_tree_pairs(prompt, []))
    flops += 2 * sizes.model.tower_params * PATCHES_PER_TOKEN * prompt
    return flops * config.prompts_per_iteration / config.world_size


def picture_flops(resolved: Resolved) -> float:
    """FLOPs of one picture; 0 without a diffusion model."""
    renderer: Any = resolved.renderer.config
    name = resolved.renderer.name
    if name == "sd3":
        return sd3(renderer.height_px, renderer.num_steps)
    if not name.startswith("qwen_image"):
        return 0.0
    side_px = math.isqrt(renderer.output_area_px)
    if name == "qwen_image_21":
        return image_21(side_px, 1, renderer.num_steps)
    source_tokens = TOKENS_OF_PLUS if name.endswith("plus") else side_px**2 // 28**2
    return edit(side_px, source_tokens, renderer.num_steps, renderer.true_cfg_scale > 1)


def sd3(side_px: int, num_steps: int) -> float:
    """FLOPs of a picture of SD3 Medium with guidance, without its VAE and text encoders."""
    import torch
    from diffusers import SD3Transformer2DModel

    with META, torch.no_grad():
        model = SD3Transformer2DModel(
            num_layers=24,
            num_attention_heads=24,
            caption_projection_dim=1536,
            pos_embed_max_size=192,
        )
        inputs = {
            "hidden_states": torch.empty(2, 16, side_px // 8, side_px // 8),
            "encoder_hidden_states": torch.empty(2, 77 + 256, 4096),
            "pooled_projections": torch.empty(2, 2048),
            "timestep": torch.empty(2),
        }
        return num_steps * flops_of(lambda: model(**inputs))


def row(name: str) -> str:
    """A row of the Markdown table."""
    gpu, num_samples = RUNS[name]
    config = load_config(f"configs/{name}.jsonnet", (), ENVIRONMENT)
    resolved = build.resolve(config)
    sizes = footprint.sizes(resolved)
    assert sizes is not None
    length = COMPLETION_SHARE * config.sampling.max_completion_tokens
    if resolved.policy.name == "emu3":
        length = EMU3_TOKENS
    pictures = config.prompts_per_iteration * (config.generations_per_prompt + 1)
    drawn = picture_flops(resolved) * pictures / config.world_size
    rate = EFFICIENCY * gpu.flops
    seconds = [
        sampling_s(sizes, length, gpu, config.gpu_gb),
        drawn / rate,
        policy_flops(resolved, sizes, length) / rate,
    ]
    questions = 2 * pictures * any(plugin.cls.needs_judge for plugin in resolved.rewards.values())
    judge_s = questions * JUDGE_FLOPS / (EFFICIENCY * H100.flops * JUDGE_GPUS)
    # The judge grades while pictures are rendered and other groups are trained on.
    iteration_s = seconds[0] + max(sum(seconds[1:]), judge_s)
    iterations = config.num_iterations or math.ceil(
        (config.num_epochs or 0) * num_samples / config.prompts_per_iteration
    )
    parts = " | ".join(f"{value:.0f}" for value in [*seconds, judge_s, iteration_s])
    gpus = f"{config.world_size + 2 * (name == 'prompt_enhancement')} x {gpu.name}"
    return f"| `{name}` | {gpus} | {parts} | {iterations} | {iterations * iteration_s / 3600:.1f} |"


if __name__ == "__main__":
    print(
        "| config | GPUs | sampling, s | pictures, s | policy, s | judge, s | iteration, s "
        "| iterations | hours |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    print("\n".join(row(name) for name in RUNS))
