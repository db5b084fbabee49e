"""Writes adapter folders without collective calls (transformers' own save has some)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

WRAPPER = "model."
"""Where the policy's module keeps the model: the prefix of its parameter names."""


def peft_name(parameter_name: str) -> str:
    """`model.base_model...lora_A.default.weight` -> PEFT's state-dict name for it."""
    assert parameter_name.startswith(WRAPPER) and ".default." in parameter_name, parameter_name
    return parameter_name.removeprefix(WRAPPER).replace(".default.", ".")


def plain_config(peft_config: Any) -> dict[str, Any]:
    """A PEFT config as JSON takes it: sets become sorted lists."""
    return {
        key: sorted(value) if isinstance(value, set) else value
        for key, value in peft_config.to_dict().items()
    }


def write_adapter(
    folder: str, tensors: Mapping[str, torch.Tensor], lora_config: Mapping[str, Any]
) -> None:
    """A PEFT adapter folder: loads in `PeftModel.from_pretrained` and as a vLLM LoRA."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    config = {**lora_config, "inference_mode": True}
    (path / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    write_safetensors(path / "adapter_model.safetensors", tensors)


def write_safetensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Clones first: safetensors refuses tensors that share memory (tied weights)."""
    from safetensors.torch import save_file

    whole = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    save_file(whole, path, metadata={"format": "pt"})
