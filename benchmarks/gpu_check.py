"""Items 1 and 4b: measures the device's rate, and checks its attention kernel by a dense mask.

Axes: `_S` tokens of a packed row, `_H` heads, `_D` their width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from benchmarks.gpu_bench import Bench, cleared, relative_error
from benchmarks.gpu_models import TINY, make_group, make_policy, run_config, save_texts
from rl.algorithm import attention_kernels
from rl.algorithm.attention_kernels import Kernel
from rl.api.types import PackedGroup, TokenOutputs
from rl.meter.device import measure_flops_per_s
from rl.policies.shared.packed_attention import Packing, attention

LARGEST_ERROR = {"bfloat16": 0.02, "float32": 1e-5}
"""Relative error of attention: a bfloat16 kernel rounds its weights to 8 bits of mantissa. One key
too many or too few in the short runs below gives ten times that error."""
WORSE_BY = 1.5
"""Largest error of a half-precision policy over its error with float32 attention."""
LAYOUTS: dict[str, list[tuple[int, tuple[int, ...]]]] = {
    "a group": [(65, (33, 1, 17, 8, 2, 30, 5, 9))],
    "groups of all kinds": [(40, (7,)), (3, (12, 0, 5)), (129, (64, 64))],
    "prompts alone": [(21, (0,)), (50, (0, 0))],
}
"""(prompt tokens, tokens of each completion) of every group in a row."""


def ceilings(bench: Bench) -> None:
    """Item 1."""
    tflops = measure_flops_per_s(bench.device, bench.dtype) / 1e12
    bench.tell(f"matrix product, {bench.dtype}", note=f"{tflops:.1f} TFLOP/s")


def packed_attention(bench: Bench) -> None:
    """Item 4b; problems are failures, and later items then use 'sdpa'."""
    problems = []
    try:
        dtype = getattr(torch, bench.dtype)
        kernel = attention_kernels.choose_kernel("auto", bench.device, dtype)
        problems += _kernel_problems(bench, kernel)
        problems += _policy_problems(bench)
    except Exception as error:  # for example, this torch has another signature of an operator
        problems.append(f"it raised {type(error).__name__}: {error}")
    for problem in problems:
        bench.report.fail(f"4b: packed attention: {problem}")
    verdict = "FAIL: going on with attn_implementation 'sdpa'" if problems else "PASS"
    bench.tell("packed attention on this device", note=verdict)
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
        errors = attention_errors(
            kernel, groups, (num_heads, num_key_heads, width), bench.device, bench.dtype
        )
        note = ", ".join(f"{quantity} {error:.1e}" for quantity, error in errors.items())
        bench.tell(f"attention of {name}, relative error", note=note)
        problems += [
            f"{name}: {quantity} is off by {error:.2g} of its size"
            for quantity, error in errors.items()
            if not error <= LARGEST_ERROR[bench.dtype]
        ]
    return problems


def groups_of(layout: Sequence[tuple[int, tuple[int, ...]]]) -> tuple[PackedGroup, ...]:
    """Packed groups, one after the other."""
    groups, start = [], 0
    for prompt_len, completion_lens in layout:
        groups.append(PackedGroup(start, prompt_len, completion_lens))
        start += prompt_len + sum(completion_lens)
    return tuple(groups)


def visible(groups: Sequence[PackedGroup]) -> torch.Tensor:
    """[S, S] bool by definition: a token sees earlier tokens of its run and of its group's
    prompt."""
    runs = []
    for number, group in enumerate(groups):
        runs += [(number, 0)] * group.prompt_len
        for g, length in enumerate(group.completion_lens, start=1):
            runs += [(number, g)] * length
    group_S, run_S = torch.tensor(runs).unbind(1)
    together = group_S[:, None] == group_S
    earlier = torch.ones(len(runs), len(runs), dtype=torch.bool).tril()
    own_or_prompt = (run_S[:, None] == run_S) | (run_S == 0)
    return together & earlier & own_or_prompt


def attention_errors(
    kernel: Kernel,
    groups: tuple[PackedGroup, ...],
    heads: tuple[int, int, int],
    device: str,
    dtype: str,
) -> dict[str, float]:
    """Relative errors of the result and the three gradients against float64 with a dense mask.

    `heads`: (query heads, key heads, width)."""
    num_heads, num_key_heads, width = heads
    generator = torch.Generator(device).manual_seed(0)
    mask_SS = visible(groups).to(device)

    def random(num: int) -> torch.Tensor:
        tensor = torch.randn(1, num, len(mask_SS), width, generator=generator, device=device)
        return tensor.to(getattr(torch, dtype))

    inputs = [random(num).requires_grad_() for num in (num_heads, num_key_heads, num_key_heads)]
    grad_out = random(num_heads).transpose(1, 2)
    query, key, value = inputs
    out, _ = attention(None, query, key, value, None, packing=Packing(groups, kernel))
    values = [out, *torch.autograd.grad(out, inputs, grad_out)]

    doubles = [tensor.detach().double().requires_grad_() for tensor in inputs]
    query, key, value = doubles
    key, value = (x.repeat_interleave(num_heads // num_key_heads, dim=1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) * width**-0.5
    probs = scores.masked_fill(~mask_SS, float("-inf")).softmax(-1)
    dense = (probs @ value).transpose(1, 2)
    true = [dense, *torch.autograd.grad(dense, doubles, grad_out.double())]
    names = ("result", "query's gradient", "key's gradient", "value's gradient")
    return {n: relative_error(a, b) for n, a, b in zip(names, values, true, strict=True)}


# A whole policy


def _policy_problems(bench: Bench) -> list[str]:
    """Compares the device's dtype with either kernel to float32 with the plain kernel."""
    small = replace(bench, size=TINY, folder=bench.folder / "small")
    save_texts(small)
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
                _move_adapter(policy.module)
                weights = policy.module.state_dict()
            policy.module.load_state_dict(weights)
            outcomes[name] = _outcome(small, policy)
    problems = []
    for quantity, fast, plain, true in zip(
        ("log-probs", "states", "gradient"), *outcomes.values(), strict=True
    ):
        error, unavoidable = relative_error(fast, true), relative_error(plain, true)
        note = f"{error:.1e}, with float32 attention {unavoidable:.1e}"
        bench.tell(f"a policy's {quantity}, relative error", note=note)
        if not error <= WORSE_BY * unavoidable + 1e-5:
            problems.append(f"a policy's {quantity} are off by {error:.2g}, not {unavoidable:.2g}")
    return problems


def _move_adapter(module: torch.nn.Module) -> None:
    """Draws the adapter: a new adapter's B is zero, so that half of its gradient is zero, too."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))


def _outcome(bench: Bench, policy: Any) -> list[torch.Tensor]:
    """[log-probs, states, flat gradient] of two groups packed in one row."""
    groups = [make_group(bench, policy, bench.size.policy_px[0], index) for index in range(2)]
    rows = [(prompt, ids[g:]) for prompt, ids_G in groups for g, ids in enumerate(ids_G)]
    outputs: TokenOutputs = policy.module(policy.collate(rows))
    outputs.logprobs.sum().backward()
    gradients = [p.grad.flatten() for p in policy.module.parameters() if p.grad is not None]
    return [outputs.logprobs.detach(), outputs.hidden.detach(), torch.cat(gradients)]
