"""Computes how long the shipped configs for real models take, and an iteration with a render pool.

    python -m benchmarks.run_hours

Nothing is timed: FLOPs are divided by the share of a GPU's rate that was measured on an H100, or
assumed (rl/check/iteration_time.py).
Start, held-out evaluations and checkpoints are left out.
The first table is in docs/gpu.md, the second in docs/scale.md.
"""

from __future__ import annotations

import math
from dataclasses import replace

from rl import build
from rl.check import memory_plan
from rl.check.iteration_time import (
    COMPLETION_SHARE,
    JUDGE_FLOPS,
    JUDGE_FLOPS_S,
    PICTURES,
    POLICY,
    bound_by,
    computed,
    enough_workers,
    gpu_of,
    group_flops,
    sampling_s,
)
from rl.config.schema import load_config

EMU3_TOKENS = 1065
"""Length of Emu3's completion, which is a picture."""
RUNS = {
    "one_gpu_24gb": 7600,
    "one_gpu_48gb": 192,
    "one_gpu_80gb": 499,
    "vlm_reasoning": 7600,
    "prompt_enhancement": 192,
    "qwen_image_21_fewstep": 499,
    "qwen_image_21": 499,
    "qwen_image_edit_fewstep": 499,
    "qwen_image_edit_plus": 499,
    "qwen_image_edit": 499,
    "sft_s__rl_sc": 0,
}
"""Config -> number of training samples; 0: the config gives the number of iterations."""
POOLS = (
    ("qwen_image_edit", 1),
    ("qwen_image_edit", 4),
    ("qwen_image_21", 1),
    ("qwen_image_21", 4),
    ("qwen_image_edit_fewstep", 1),
)
"""(config, judges); one picture at a time."""
WORKERS = (0, 8, 16, 32, 64)
ENVIRONMENT = {
    "APP__BASE_EXP_DIR": "runs",
    "APP__RUN_NAME": "any",
    "APP__REWARD_FUNCTION_API_BASE": "http://judge:4877",
    "APP__DATA_DIR": "any",
}


def row(name: str) -> str:
    """A row of the Markdown table."""
    num_samples = RUNS[name]
    config = load_config(f"configs/{name}.jsonnet", (), ENVIRONMENT)
    gpu = gpu_of(config.gpu_gb)
    resolved = build.resolve(config)
    sizes = memory_plan.sizes(resolved)
    assert sizes is not None
    length = COMPLETION_SHARE * config.sampling.max_completion_tokens
    if resolved.policy.name == "emu3":
        length = EMU3_TOKENS
    pictures = config.prompts_per_iteration * (config.generations_per_prompt + 1)
    each = resolved.renderer.cls.cost(resolved.renderer.config).picture_flops or 0.0
    policy = sum(group_flops(config, sizes, length)) * config.prompts_per_iteration
    rate = gpu.flops * config.world_size
    sampling = sampling_s(sizes, length, gpu, config.gpu_gb)
    seconds = [sampling, each * pictures / (PICTURES * rate), policy / (POLICY * rate)]
    questions = 2 * pictures * any(plugin.cls.needs_judge for plugin in resolved.rewards.values())
    judge_s = questions * JUDGE_FLOPS / JUDGE_FLOPS_S
    # The judge grades while pictures are rendered and other groups are trained on.
    iteration_s = seconds[0] + max(sum(seconds[1:]), judge_s)
    iterations = config.num_iterations or math.ceil(
        (config.num_epochs or 0) * num_samples / config.prompts_per_iteration
    )
    parts = " | ".join(f"{value:.0f}" for value in [*seconds, judge_s, iteration_s])
    gpus = f"{config.world_size + 2 * (name == 'prompt_enhancement')} x {gpu.name}"
    return f"| `{name}` | {gpus} | {parts} | {iterations} | {iterations * iteration_s / 3600:.1f} |"


def pool_row(name: str, judges: int) -> str:
    """A row of the table of render pools."""
    config = load_config(f"configs/{name}.jsonnet", ["renderer.batch_size=1"], ENVIRONMENT)
    work = replace(computed(build.resolve(config)), judge_slots=judges)
    enough = replace(work, workers=enough_workers(work))
    seconds = " | ".join(f"{replace(work, workers=n).total_s:.0f}" for n in WORKERS)
    return (
        f"| `{name}` | {judges} | {seconds} | {enough.workers}: {enough.total_s:.0f} "
        f"| {bound_by(enough)} |"
    )


if __name__ == "__main__":
    print(
        "| config | GPUs | sampling, s | pictures, s | policy, s | judge, s | iteration, s "
        "| iterations | hours |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    print("\n".join(row(name) for name in RUNS))
    workers = " | ".join(str(n) for n in WORKERS)
    print(f"\n| config | judges | {workers} | enough | which then bounds it |")
    print(f"|---|---|{'---|' * len(WORKERS)}---|---|")
    print("\n".join(pool_row(*pool) for pool in POOLS))
