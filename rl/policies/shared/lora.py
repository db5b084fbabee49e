"""Wrapping a model in the adapter that a policy's section asks for.

What: the section's cross-field mistakes, and the PEFT model. What not: which layers a policy adapts
(it names them), names and files of adapters (`adapters.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl.api.policy import LoraSection
from rl.record.adapter_base import ADAPTER_CONFIG, read_config


def adapter_problems(adapter_path: str, lora: LoraSection | None) -> list[str]:
    """What keeps `adapter_path` from being the adapter to start from, each with its key."""
    problems = []
    if adapter_path and not Path(adapter_path, ADAPTER_CONFIG).is_file():
        problems.append(f"adapter_path: {adapter_path!r} holds no {ADAPTER_CONFIG}")
    elif adapter_path:
        try:
            read_config(Path(adapter_path))
        except ValueError as error:
            problems.append(f"adapter_path: {error}")
    if adapter_path and lora is None:
        problems.append("adapter_path: full fine-tuning (lora: null) trains no adapter; drop one")
    return problems


def add_adapter(
    model: Any, lora: LoraSection, adapter_path: str, targets: str | Sequence[str]
) -> Any:
    """The model with a trainable LoRA on the layers `targets` names (PEFT: a regex or names), fresh
    or from `adapter_path`.

    Raises ValueError when `adapter_path` holds another shape than `lora` asks for.
    """
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model

    if adapter_path:
        adapted = PeftModel.from_pretrained(model, adapter_path, is_trainable=True)
        found = adapted.peft_config["default"]
        if (found.r, found.lora_alpha) != (lora.r, lora.alpha):
            raise ValueError(
                f"policy.adapter_path {adapter_path} has r={found.r} alpha="
                f"{found.lora_alpha}, policy.lora asks for r={lora.r} "
                f"alpha={lora.alpha}: make them equal"
            )
        return adapted
    config = LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
    )
    with torch.random.fork_rng(devices=[]):
        # Every rank starts from the same adapter, whatever it drew before.
        torch.manual_seed(lora.init_seed)
        return get_peft_model(model, config)
