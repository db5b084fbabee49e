"""Items 1 and 4b: the device's rate, and its attention kernel against a dense mask.

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
"""Relative, of attention: a bfloat16 kernel rounds its weights to 8 bits of mantissa. One key too
many or too few among the short runs below is ten times that."""
WORSE_BY = 1.5
"""So much more than with float32 attention a half-precision policy may be off."""
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
    """Item 4b; what is wrong is told loudly, and the items behind it go on with 'sdpa'."""
    problems = []
    try:
        dtype = getattr(torch, bench.dtype)
        kernel = attention_kernels.choose_kernel("auto", bench.device, dtype)
        problems += _kernel_problems(bench, kernel)
        problems += _policy_problems(bench)
    except Exception as error:  # an operator that this torch has under another form
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
        told = ", ".join(f"{what} {error:.1e}" for what, error in errors.items())
        bench.tell(f"attention of {name}, relative error", note=told)
        problems += [
            f"{name}: {what} is off by {error:.2g} of its size"
            for what, error in errors.items()
            if not error <= LARGEST_ERROR[bench.dtype]
        ]
    return problems


def groups_of(layout: Sequence[tuple[int, tuple[int, ...]]]) -> tuple[PackedGroup, ...]:
    """One behind the other."""
    groups, start = [], 0
    for prompt_len, completion_lens in layout:
        groups.append(PackedGroup(start, prompt_len, completion_lens))
        start += prompt_len + sum(completion_lens)
    return tuple(groups)


def visible(groups: Sequence[PackedGroup]) -> torch.Tensor:
    """[S, S] bool, token by token from the definition: earlier tokens of one's own run, and all of
    one's group's prompt."""
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

    `heads`: (of queries, of keys, width)."""
    num_heads, num_key_heads, width = heads
    generator = torch.Generator(device).manual_seed(0)
    mask_SS = visible(groups).to(device)

    def drawn(num: int) -> torch.Tensor:
        tensor = torch.randn(1, num, len(mask_SS), width, generator=generator, device=device)
        return tensor.to(getattr(torch, dtype))

    inputs = [drawn(num).requires_grad_() for num in (num_heads, num_key_heads, num_key_heads)]
    grad_out = drawn(num_heads).transpose(1, 2)
    query, key, value = inputs
    out, _ = attention(None, query, key, value, None, packing=Packing(groups, kernel))
    found = [out, *torch.autograd.grad(out, inputs, grad_out)]

    doubles = [tensor.detach().double().requires_grad_() for tensor in inputs]
    query, key, value = doubles
    key, value = (x.repeat_interleave(num_heads // num_key_heads, dim=1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) * width**-0.5
    probs = scores.masked_fill(~mask_SS, float("-inf")).softmax(-1)
    dense = (probs @ value).transpose(1, 2)
    true = [dense, *torch.autograd.grad(dense, doubles, grad_out.double())]
    names = ("result", "query's gradient", "key's gradient", "value's gradient")
    return {n: relative_error(a, b) for n, a, b in zip(names, found, true, strict=True)}


# A whole policy


def _policy_problems(bench: Bench) -> list[str]:
    """The device's dtype with either kernel against float32 with the plain one."""
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
    for what, fast, plain, true in zip(
        ("log-probs", "states", "gradient"), *outcomes.values(), strict=True
    ):
        error, unavoidable = relative_error(fast, true), relative_error(plain, true)
        note = f"{error:.1e}, with float32 attention {unavoidable:.1e}"
        bench.tell(f"a policy's {what}, relative error", note=note)
        if not error <= WORSE_BY * unavoidable + 1e-5:
            problems.append(f"a policy's {what} are off by {error:.2g}, not {unavoidable:.2g}")
    return problems


def _move_adapter(module: torch.nn.Module) -> None:
    """A fresh adapter's B is zero, and half of its gradient with it."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                moved = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(0.05 * moved)


def _outcome(bench: Bench, policy: Any) -> list[torch.Tensor]:
    """[log-probs, states, gradient] of two groups in one row, flat."""
    groups = [make_group(bench, policy, bench.size.policy_px[0], index) for index in range(2)]
    rows = [(prompt, ids[g:]) for prompt, ids_G in groups for g, ids in enumerate(ids_G)]
    outputs: TokenOutputs = policy.module(policy.collate(rows))
    outputs.logprobs.sum().backward()
    gradients = [p.grad.flatten() for p in policy.module.parameters() if p.grad is not None]
    return [outputs.logprobs.detach(), outputs.hidden.detach(), torch.cat(gradients)]
