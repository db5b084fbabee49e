"""Step `kernels`: the policies' packed attention against float64, and a policy against float32.

Axes: `_S` tokens of a packed row, `_H` heads, `_D` their width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from rl import build
from rl.algorithm.attention_kernels import PLAIN, Kernel, choose_kernel
from rl.api.types import PackedGroup
from rl.check_gpu.gpu_engines import move
from rl.check_gpu.lines import Line, Setup, result
from rl.config.schema import load_config
from rl.learner.backends import trainable_parameters
from rl.policies.shared.attention import Packing, attention
from rl.ranks.dist import Dist

LARGEST_ERROR = {"bfloat16": 0.02, "float32": 1e-5}
"""Limit of the relative error; a bfloat16 kernel rounds attention weights to 8 bits of mantissa.
One key too many or too few in the short segments below causes an error ten times as large."""
LARGEST_BIAS = {"bfloat16": 2e-3, "float32": 1e-5}
"""Limit of the error in scale: rounding errors average out, a wrong scale does not."""
WORSE_BY = 1.5
"""Limit of the chosen kernel's error in a whole policy, divided by the plain kernel's."""
LAYOUTS: dict[str, list[tuple[int, tuple[int, ...]]]] = {
    "a group": [(65, (33, 1, 17, 8, 2, 30, 5, 9))],
    "groups of all kinds": [(40, (7,)), (3, (12, 0, 5)), (129, (64, 64))],
    "prompts alone": [(21, (0,)), (50, (0, 0))],
}
"""(prompt tokens, tokens of each completion) of every group in a row."""
HEADS = {"Qwen2.5-VL": (28, 4, 128), "Qwen3-VL and Emu3": (32, 8, 128)}
TINY_HEADS = {"Qwen2.5-VL": (4, 2, 16), "Qwen3-VL and Emu3": (4, 2, 32)}
"""(query heads, key heads, width)."""


def relative_error(actual: torch.Tensor, true: torch.Tensor) -> float:
    """|actual - true| / |true|, Euclidean."""
    true = true.detach().double()
    return float((actual.detach().to(true) - true).norm() / true.norm())


def groups_of(layout: Sequence[tuple[int, tuple[int, ...]]]) -> tuple[PackedGroup, ...]:
    """The groups of a packed row, one after the other."""
    groups, start = [], 0
    for prompt_len, completion_lens in layout:
        groups.append(PackedGroup(start, prompt_len, completion_lens))
        start += prompt_len + sum(completion_lens)
    return tuple(groups)


def visible(groups: Sequence[PackedGroup]) -> torch.Tensor:
    """[S, S] bool: whether token i sees token j, by definition: earlier tokens of its own segment
    (prompt or completion), and its group's prompt."""
    segments = []
    for number, group in enumerate(groups):
        segments += [(number, 0)] * group.prompt_len
        for g, length in enumerate(group.completion_lens, start=1):
            segments += [(number, g)] * length
    group_S, segment_S = torch.tensor(segments).unbind(1)
    together = group_S[:, None] == group_S
    earlier = torch.ones(len(segments), len(segments), dtype=torch.bool).tril()
    own_or_prompt = (segment_S[:, None] == segment_S) | (segment_S == 0)
    return together & earlier & own_or_prompt


def attention_errors(
    kernel: Kernel,
    groups: tuple[PackedGroup, ...],
    heads: tuple[int, int, int],
    device: str,
    dtype: str,
) -> tuple[dict[str, float], list[str]]:
    """(relative errors of the result and the three gradients against float64 with a dense mask,
    a message per problem). `heads`: (of queries, of keys, width)."""
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
    actual = [out, *torch.autograd.grad(out, inputs, grad_out)]

    doubles = [tensor.detach().double().requires_grad_() for tensor in inputs]
    query, key, value = doubles
    key, value = (x.repeat_interleave(num_heads // num_key_heads, dim=1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) * width**-0.5
    probs = scores.masked_fill(~mask_SS, float("-inf")).softmax(-1)
    dense = (probs @ value).transpose(1, 2)
    true = [dense, *torch.autograd.grad(dense, doubles, grad_out.double())]
    names = ("result", "query's gradient", "key's gradient", "value's gradient")
    errors, problems = {}, []
    for name, a, b in zip(names, actual, true, strict=True):
        errors[name], b = relative_error(a, b), b.detach()
        scale = float((a.detach().double() * b).sum() / (b * b).sum())
        if not (errors[name] <= LARGEST_ERROR[dtype] and abs(scale - 1) <= LARGEST_BIAS[dtype]):
            problems.append(f"{name} has a relative error of {errors[name]:.2g}, scale {scale:.4f}")
    return errors, problems


def kernels(setup: Setup) -> Iterator[Line]:
    """Checks each kernel of `policy.attn_implementation` with the heads of each policy, then that a
    whole policy computes with it."""
    key = "policy.attn_implementation"
    layouts = LAYOUTS | {"a long group": [(400, (64,) * 8)]}
    auto = choose_kernel("auto", setup.device, getattr(torch, setup.dtype))
    for name, kernel in (("auto", auto), ("sdpa", PLAIN)):
        for policy, heads in (TINY_HEADS if setup.tiny else HEADS).items():
            worst, wrong = 0.0, []
            for row, layout in layouts.items():
                groups = groups_of(layout)
                errors, faults = attention_errors(kernel, groups, heads, setup.device, setup.dtype)
                worst = max(worst, *errors.values())
                wrong += [f"in {row} the {fault}" for fault in faults]
            other = "sdpa" if name == "auto" else "auto"
            note = (wrong or [f"error {worst:.0e}, limit {LARGEST_ERROR[setup.dtype]:g}"])[0]
            what = f"packed attention ({name}) of {policy}"
            yield result(what, not wrong, note, f"set {key}={other}", {key: other})
    fast, plain, true = policy_outcomes(setup)
    for what in true:
        error, unavoidable = (relative_error(x[what], true[what]) for x in (fast, plain))
        good = error <= WORSE_BY * unavoidable + 1e-5
        note = f"error {error:.0e}, with plain attention {unavoidable:.0e}"
        yield result(f"a policy's {what}", good, note, f"set {key}=sdpa", {key: "sdpa"})


def policy_outcomes(setup: Setup) -> list[dict[str, torch.Tensor]]:
    """[with the chosen kernel, with the plain one, with that in float32]: what the quickstart's
    policy gives for two groups in a row, and the gradient of all its log-probs."""
    weights: dict[str, torch.Tensor] = {}
    outcomes = []
    for dtype, kernel in ((setup.dtype, "auto"), (setup.dtype, "sdpa"), ("float32", "sdpa")):
        words = [f"policy.dtype={dtype}", f"policy.attn_implementation={kernel}"]
        path, *overrides = setup.words("quickstart", *words, "engine.type=transformers")
        resolved = build.resolve(load_config(path, overrides))
        policy: Any = build.build_policy(resolved, Dist.from_env(setup.device))
        if not weights:
            move(policy.module)  # a new adapter's B is 0, and A then has no gradient
            weights = policy.module.state_dict()
        policy.module.load_state_dict(weights)
        [source] = build.build_data(resolved, resolved.train)
        rows = [
            (policy.build_prompt(source[index]), [20 + 7 * index + g + t for t in range(5 + g)])
            for index in range(2)
            for g in range(4)
        ]
        outputs = policy.module(policy.collate(rows))
        trained = list(trainable_parameters(policy.module).values())
        grads = torch.autograd.grad(outputs.logprobs.sum(), trained)
        named = {"log-probs": outputs.logprobs, "states": outputs.hidden}
        outcomes.append({**named, "gradient": torch.cat([grad.flatten() for grad in grads])})
    return outcomes
