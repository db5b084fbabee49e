"""Weights into a running vLLM, and back out of it. Runs inside the engine's worker.

Nothing is written to files or merged into the base. Called by `plug.py` through `collective_rpc`.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import compress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

ADAPTER_ID = 1
"""vLLM's number for the policy's adapter; there is no other."""

Lora = Mapping[str, "tuple[torch.Tensor, torch.Tensor]"]
"""Layer name -> (A [r, in], B [out, r] times alpha / r), in the engine's dtype, on its device."""


def put_lora(
    worker: Any, tensors: Mapping[str, torch.Tensor], lora_config: Mapping[str, Any]
) -> Lora:
    """Replace the adapter; returns what the worker must now hold (`lora_difference`).

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
        name: (lora.lora_a.clone(), lora.lora_b * lora.scaling)
        for name, lora in adapter.loras.items()
    }
    manager.remove_adapter(ADAPTER_ID)
    manager.add_adapter(adapter)
    manager.activate_adapter(ADAPTER_ID)
    return expected


def lora_difference(worker: Any, expected: Lora) -> str:
    """In what the slots that the forward multiplies with are not `expected`, bit for bit; '' if in
    nothing. Compared where they lie: hashing an adapter would bring all of it to the host."""
    import torch

    held = _slots(worker)
    if unknown := expected.keys() - held.keys():
        return f"no layer {min(unknown)}"
    wrong = []
    for name, (slot_a, slot_b) in held.items():
        a, b = expected.get(name, (slot_a[:0], slot_b[:, :0]))
        rank = a.shape[0]
        same = _bits_equal(slot_a[:rank], a) & _bits_equal(slot_b[:, :rank], b)
        # Slots are as wide as the largest rank vLLM was told of; the rest must multiply to nothing.
        wrong.append(~same | slot_a[rank:].any() | slot_b[:, rank:].any())
    found = list(compress(held, torch.stack(wrong).tolist()))
    return f"other weights in {len(found)} layers, {found[0]} among them" if found else ""


def _slots(worker: Any) -> Lora:
    """Linear layer's name -> its slot's (A [max_rank, in], B [out, max_rank])."""
    manager = worker.model_runner.lora_manager._adapter_manager
    if ADAPTER_ID not in manager.lora_index_to_id:
        return {}
    slot = manager.lora_index_to_id.index(ADAPTER_ID)
    return {
        name: (layer.lora_a_stacked[i][slot, 0], layer.lora_b_stacked[i][slot, 0])
        for packed_name, layer in manager.modules.items()
        # Embeddings and the head, which are never adapted, have one tensor here.
        if isinstance(getattr(layer, "lora_a_stacked", None), tuple)
        for i, name in enumerate(manager.packed_modules.get(packed_name, [packed_name]))
    }


def _bits_equal(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """[] bool, on their device; -0.0 and 0.0 differ, a NaN equals itself."""
    import torch

    integers = {2: torch.int16, 4: torch.int32}[first.element_size()]
    return (first.view(integers) == second.view(integers)).all()
