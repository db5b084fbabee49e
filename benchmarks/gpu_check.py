"""Measures the device's matmul rate, and the error of its attention kernel against a dense mask.

rl bench-gpu --items 1,4b
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from benchmarks.gpu_bench import Bench, cleared
from benchmarks.gpu_models import TINY, make_group, make_policy, run_config, save_policy_files
from rl.algorithm import attention_kernels
from rl.algorithm.attention_kernels import Kernel
from rl.api.types import TokenOutputs
from rl.check_gpu.gpu_kernels import LAYOUTS, attention_errors, groups_of, relative_error
from rl.meter.device import measure_flops_per_s

WORSE_BY = 1.5
"""Limit on the fast kernel's error in a half-precision policy, divided by the plain kernel's."""


def matmul_rate(bench: Bench) -> None:
    """Measures the rate of matrix products, against which all FLOPs are compared."""
    tflops = measure_flops_per_s(bench.device, bench.dtype) / 1e12
    bench.log(f"matrix product, {bench.dtype}", note=f"{tflops:.1f} TFLOP/s")


def packed_attention(bench: Bench) -> None:
    """Checks the fast kernel alone and in a policy. If it is wrong, fails the benchmark and makes
    the later items use 'sdpa'."""
    problems = []
    try:
        dtype = getattr(torch, bench.dtype)
        kernel = attention_kernels.choose_kernel("auto", bench.device, dtype)
        problems += _kernel_problems(bench, kernel)
        problems += _policy_problems(bench)
    except Exception as error:  # e.g. an operator that has other arguments in this torch
        problems.append(f"it raised {type(error).__name__}: {error}")
    for problem in problems:
        bench.report.fail(f"4b: packed attention: {problem}")
    verdict = "FAIL: going on with attn_implementation 'sdpa'" if problems else "PASS"
    bench.log("packed attention on this device", note=verdict)
    if problems:
        bench.attention = "sdpa"


# Attention alone


def _kernel_problems(bench: Bench, kernel: Kernel) -> list[str]:
    size, language = bench.size, bench.size.language
    num_heads, num_key_heads = language["num_attention_heads"], language["num_key_value_heads"]
    width = language["hidden_size"] // num_heads
    longest = size.num_prompt_tokens(size.policy_px[0]), (size.completion_tokens,) * size.group
    problems = []
    for name, layout in {**LAYOUTS, "a group at this size": [longest]}.items():
        groups = groups_of(layout)
        errors, wrong = attention_errors(
            kernel, groups, (num_heads, num_key_heads, width), bench.device, bench.dtype
        )
        note = ", ".join(f"{what} {error:.1e}" for what, error in errors.items())
        bench.log(f"attention of {name}, relative error", note=note)
        problems += [f"{name}: {problem}" for problem in wrong]
    return problems


# A whole policy


def _policy_problems(bench: Bench) -> list[str]:
    """Compares a tiny policy in the device's dtype, with the fast and the plain kernel, with the
    same policy in float32 with the plain kernel."""
    small = replace(bench, size=TINY, folder=bench.folder / "small")
    save_policy_files(small)
    rounded = "bfloat16" if bench.dtype == "bfloat16" else "float32"
    outcomes: dict[str, list[torch.Tensor]] = {}
    weights: dict[str, torch.Tensor] = {}
    with cleared(bench.device):
        for name, dtype, kernel in (
            ("fast", rounded, "auto"),
            ("plain", rounded, "sdpa"),
            ("float32", "float32", "sdpa"),
        ):
            section = {"dtype": dtype, "attn_implementation": kernel}
            policy: Any = make_policy(small, run_config(small, TINY.policy_px[0], policy=section))
            if not weights:
                _randomize_adapter(policy.module)
                weights = policy.module.state_dict()
            policy.module.load_state_dict(weights)
            outcomes[name] = _outcome(small, policy)
    problems = []
    for what, fast, plain, true in zip(
        ("log-probs", "states", "gradient"), *outcomes.values(), strict=True
    ):
        error, unavoidable = relative_error(fast, true), relative_error(plain, true)
        note = f"{error:.1e}, with float32 attention {unavoidable:.1e}"
        bench.log(f"a policy's {what}, relative error", note=note)
        if not error <= WORSE_BY * unavoidable + 1e-5:
            problems.append(f"a policy's {what} are off by {error:.2g}, not {unavoidable:.2g}")
    return problems


def _randomize_adapter(module: torch.nn.Module) -> None:
    """Draws all adapter weights: with B = 0, as in a new adapter, A would have no gradient."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))


def _outcome(bench: Bench, policy: Any) -> list[torch.Tensor]:
    """[log-probs, states, gradient] of two groups in one row, flat."""
    groups = [make_group(bench, policy, bench.size.policy_px[0], index) for index in range(2)]
    rows = [(prompt, ids[g:]) for prompt, ids_G in groups for g, ids in enumerate(ids_G)]
    outputs: TokenOutputs = policy.module(policy.collate(rows))
    outputs.logprobs.sum().backward()
    gradients = [p.grad.flatten() for p in policy.module.parameters() if p.grad is not None]
    return [outputs.logprobs.detach(), outputs.hidden.detach(), torch.cat(gradients)]
