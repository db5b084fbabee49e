"""Weights into a running vLLM, and back out of it. Runs inside the engine's worker.

What: put a LoRA into the worker's slots from tensors, hash what the slots really hold, and hash
what they ought to hold. What not: files (nothing is written), merging (an adapter stays an adapter;
the base is never touched). Called by `vllm.py` through `collective_rpc`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

ADAPTER_ID = 1
"""vLLM's number for the policy's adapter; there is no other."""


def put_lora(
    worker: Any, tensors: Mapping[str, torch.Tensor], lora_config: Mapping[str, Any]
) -> str:
    """Replace the adapter; returns the hash of what the worker must now hold (`held_lora`).

    `tensors` must be clones that nobody else uses: vLLM multiplies B by alpha / r in place.
    """
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    worker_manager = worker.model_runner.lora_manager
    manager = worker_manager._adapter_manager
    helper = PEFTHelper.from_dict(dict(lora_config))
    helper.validate_legal(worker_manager.lora_config)
    adapter = LoRAModel.from_lora_tensors(
        ADAPTER_ID,
        dict(tensors),
        helper,
        device=str(worker_manager.device),
        dtype=worker_manager.lora_config.lora_dtype,
        model_vocab_size=worker_manager.vocab_size,
        weights_mapper=manager.model.hf_to_vllm_mapper.get_rename_mapper(),
    )
    if 2 * len(adapter.loras) != len(tensors):
        raise RuntimeError(
            f"vLLM read {len(adapter.loras)} layers out of {len(tensors)} LoRA tensors: a layer "
            "of policy.lora.target_modules has a name it does not know"
        )
    expected = {
        name: (lora.lora_a, lora.lora_b * lora.scaling) for name, lora in adapter.loras.items()
    }
    expected_hash = _hash(expected)
    manager.remove_adapter(ADAPTER_ID)
    manager.add_adapter(adapter)
    manager.activate_adapter(ADAPTER_ID)
    return expected_hash


def held_lora(worker: Any) -> str:
    """Hash of the adapter in the slots that the forward multiplies with."""
    manager = worker.model_runner.lora_manager._adapter_manager
    if ADAPTER_ID not in manager.lora_index_to_id:
        return "no adapter"
    slot = manager.lora_index_to_id.index(ADAPTER_ID)
    held: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for packed_name, layer in manager.modules.items():
        if not hasattr(layer, "lora_a_stacked"):
            continue
        names = manager.packed_modules.get(packed_name, [packed_name])
        for i, name in enumerate(names):
            a, b = layer.lora_a_stacked[i][slot, 0], layer.lora_b_stacked[i][slot, 0]
            if bool(a.any()):
                held[name] = (a, b)
    return _hash(held)


def _hash(loras: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> str:
    """Over names and the bytes of A and B, without the slots' padding to the largest rank."""
    import torch

    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(loras):
        a, b = loras[name]
        rank = int(a.any(dim=1).nonzero().max()) + 1 if bool(a.any()) else 0
        for tensor in (a[:rank], b[:, :rank]):
            whole = tensor.detach().cpu().contiguous()
            digest.update(f"{name} {whole.dtype} {tuple(whole.shape)}".encode())
            digest.update(whole.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
