"""What leaves the policy: weights for the engine, folders for the world.

Files are written without any collective call: under a process group transformers' own save writes
on global rank 0 only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

WRAPPER = "model."
"""Where the policy's module keeps the model: the prefix of its parameter names."""
NUM_HASHED_WHOLE = 2**14
"""Values of the largest tensor whose every byte is hashed."""


def peft_name(parameter_name: str) -> str:
    """`model.base_model...lora_A.default.weight` -> PEFT's state-dict name for it."""
    assert parameter_name.startswith(WRAPPER) and ".default." in parameter_name, parameter_name
    return parameter_name.removeprefix(WRAPPER).replace(".default.", ".")


def fingerprint(tensors: Mapping[str, torch.Tensor]) -> str:
    """blake2b over names, dtypes, shapes and bytes, in name order; of a larger matrix, its bit
    patterns' sums by row and by column, taken where it lies, instead of its bytes. All of it comes
    to the host at once: a whole model would keep it busy for half a minute, an adapter of 20 M
    values for 0.1 s of every sync."""
    import torch

    digest = hashlib.blake2b(digest_size=16)
    parts: list[torch.Tensor] = []
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        large = tensor.ndim == 2 and tensor.numel() > NUM_HASHED_WHOLE
        parts += _bit_sums(tensor) if large else (tensor,)
    if parts:
        flat = torch.cat([part.contiguous().reshape(-1).view(torch.uint8) for part in parts])
        digest.update(flat.cpu().numpy().tobytes())
    return digest.hexdigest()


def _bit_sums(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of its values read as integers: int64 sums along each axis, which wrap around alike."""
    import torch

    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[matrix.element_size()]
    bits = matrix.view(integers)
    return bits.sum(0, dtype=torch.int64), bits.sum(1, dtype=torch.int64)


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
