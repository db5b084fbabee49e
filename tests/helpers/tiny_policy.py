"""The trainable policies at tiny size, in float32 on the CPU, and imitations of training."""

from __future__ import annotations

import json
import os
from dataclasses import fields
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import tiny_emu3
import tiny_qwen
import tiny_qwen3
import torch
from transformers import PreTrainedConfig

from rl.api.policy import Policy, PolicySetup
from rl.policies.emu3 import Emu3
from rl.policies.qwen_vl import Qwen3VL, Qwen25VL

PreTrainedConfig.__repr__ = object.__repr__  # each `from_pretrained` makes one, which it may log
TEMPERATURE = 0.7
"""Temperature of `make`."""
ADAPTER = {"r": 4, "alpha": 8}
LORA = ADAPTER | {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
EDITOR = {"kind": "hidden_states", "max_completion_tokens": 16, "lora": ADAPTER}
PAINTER = {"kind": "image_tokens", "max_completion_tokens": 64}
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen2_5_vl": (tiny_qwen, Qwen25VL, EDITOR | {"template": tiny_qwen.TEMPLATE}),
    "qwen3_vl": (tiny_qwen3, Qwen3VL, EDITOR | {"template": tiny_qwen3.SEVERAL}),
    "emu3": (tiny_emu3, Emu3, PAINTER),
}
"""Family -> the module that saves its model, its plugin, the keys of a run with its renderer."""


@cache
def saved(family: str, **options: bool) -> str:
    """A folder with the tiny model of a family, which is written once per process."""
    folder = Path(mkdtemp(dir=os.environ["HF_HOME"]))
    with torch.random.fork_rng():
        return str(FAMILIES[family][0].save_policy_folder(folder, **options))


def make(folder: str = "qwen2_5_vl", **keys: Any) -> Any:
    """The policy of a folder, or of a family's tiny model; `keys`: of its config or `PolicySetup`.
    An Emu3 is fully trained unless they have a LoRA."""
    folder = saved(folder) if folder in FAMILIES else folder
    model_type = json.loads(Path(folder, "config.json").read_text())["model_type"]
    _, plugin, defaults = FAMILIES[model_type.lower().removesuffix("_text_model")]
    keys = {"dtype": "float32", "temperature": TEMPERATURE} | defaults | keys
    setup = {f.name: keys.pop(f.name) for f in fields(PolicySetup) if f.name in keys}
    return plugin(plugin.Config(type="", model_path=folder, **keys), PolicySetup(**setup))


def make_policy(folder: str = "qwen2_5_vl", **keys: Any) -> Any:
    """A policy that answers in text, at temperature 1, with a LoRA that has an effect."""
    writer = {"kind": "text", "temperature": 1.0, "max_completion_tokens": 12, "lora": LORA}
    policy = make(folder, **writer | keys)
    randomize_lora_b(policy)
    return policy


def randomize_lora_b(policy: Policy[Any]) -> None:
    """Makes LoRA's B random: if B is zero, A has no gradient and the reference is the policy."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in policy.module.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))


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
