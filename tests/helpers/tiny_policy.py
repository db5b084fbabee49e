"""The trainable policies at tiny size, in float32 on the CPU, and imitations of training."""

from __future__ import annotations

from typing import Any

import tiny_qwen
import torch

from rl.api.policy import Policy, PolicySetup
from rl.api.types import PromptTemplate
from rl.policies import emu3
from rl.policies.qwen_vl import Qwen25VL

TEMPERATURE = 0.7
"""Temperature in `make_qwen` and `make_emu3`."""
LORA = {"r": 4, "alpha": 8, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}


def make_qwen(
    folder: str,
    kind: Any = "hidden_states",
    negative: str | None = None,
    checkpointing: Any = False,
    template: PromptTemplate | None = tiny_qwen.TEMPLATE,
    seed: int = 0,
    temperature: float = TEMPERATURE,
    max_completion_tokens: int = 16,
    keeps_start: bool = False,
    **section: Any,
) -> Qwen25VL:
    """The policy of a run with an editor; `section`: keys of the policy's config."""
    section = {"dtype": "float32", "lora": {"r": 4, "alpha": 8}} | section
    return Qwen25VL(
        Qwen25VL.Config(type="qwen2_5_vl", model_path=folder, **section),
        PolicySetup(
            kind,
            template=template,
            negative_prompt=negative,
            temperature=temperature,
            max_completion_tokens=max_completion_tokens,
            gradient_checkpointing=checkpointing,
            seed=seed,
            keeps_start=keeps_start,
        ),
    )


def make_emu3(folder: str, checkpointing: Any = False, **section: Any) -> emu3.Emu3:
    """An Emu3 policy, fully trained unless `section` has a LoRA."""
    return emu3.Emu3(
        emu3.Config(type="emu3", model_path=folder, **{"dtype": "float32", **section}),
        PolicySetup(
            "image_tokens",
            temperature=TEMPERATURE,
            max_completion_tokens=64,
            gradient_checkpointing=checkpointing,
        ),
    )


def make_policy(folder: str, **section: Any) -> Qwen25VL:
    """A Qwen2.5-VL that answers in text, at temperature 1, with a LoRA that has an effect."""
    policy = make_qwen(
        folder, "text", temperature=1.0, max_completion_tokens=12, **{"lora": LORA, **section}
    )
    randomize_lora_b(policy)
    return policy


def randomize_lora_b(policy: Policy[Any]) -> None:
    """Makes LoRA's B random: if B is zero, A has no gradient and the reference is the policy."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in policy.module.named_parameters():
            if "lora_B" in name:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(0.05 * noise)


def trainable(policy: Policy[Any]) -> dict[str, torch.nn.Parameter]:
    return {n: p for n, p in policy.module.named_parameters() if p.requires_grad}


def move(policy: Policy[Any], scale: float = 0.1) -> None:
    """Imitates training: changes the trainable weights, so that policy and base differ."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in trainable(policy).values():
            parameter.add_(scale * torch.randn_like(parameter))


def step_in_bfloat16(policy: Policy[Any], learning_rate: float) -> None:
    """Imitates Adam's first step: float32 masters change by plus or minus the learning rate, which
    the rounding to bfloat16 mostly undoes."""
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in trainable(policy).values():
            parameter.copy_(parameter.float() + learning_rate * torch.randn(parameter.shape).sign())
