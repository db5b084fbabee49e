"""vLLM inside of the trainer's process: start, stop, and the weights of its model."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import compress
from typing import TYPE_CHECKING, Any

from rl.model_files import bit_sums
from rl.seeds import rng_state, set_rng_state

if TYPE_CHECKING:
    import torch

# ---- start ---------------------------------------------------------------------------------------
# Starts and stops vLLM inside the trainer's process without changing the process's state.

GRID = "image_grid"
"""Key of the image grid (h, w) in `SamplingParams.extra_args`; without it any token may follow."""
VOCABULARY = "image_vocabulary"
"""Key of the fields of `ImageVocabulary` in the engine's `additional_config`."""
SERVED_AS = {"Emu3ForCausalLM": "LlamaForCausalLM"}
"""Architecture that vLLM does not list -> vLLM's class that computes the same."""
OURS = {"Qwen3VLForConditionalGeneration": ("rl.engines.vllm_requests", "Qwen3VLWithDeepstack")}
"""Architecture -> (module, class) of ours that replaces vLLM's class."""


def register_in_process(folder: str) -> None:
    """Register the model's class with vLLM, which would else inspect it in a subprocess (12 s)."""
    from transformers import AutoConfig
    from vllm import ModelRegistry

    registered = ModelRegistry.models
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)  # nosec B615
    for architecture in config.architectures:
        lazy = registered.get(architecture) or registered.get(SERVED_AS.get(architecture, ""))
        if lazy is None:
            raise ValueError(
                f"vLLM cannot serve {architecture} (config.json in policy.model_path): use "
                "engine.type 'transformers'"
            )
        if hasattr(lazy, "module_name"):  # else its class is registered already
            module, name = OURS.get(architecture, (lazy.module_name, lazy.class_name))
            model_class = getattr(importlib.import_module(module), name)
            ModelRegistry.register_model(architecture, model_class)


@contextmanager
def untouched_globals() -> Iterator[None]:
    """Restores what vLLM's start changes: it seeds every global generator, makes
    `torch.set_num_threads` a no-op (CPU) and disables cuDNN's attention (CUDA), which the renderers
    use on Hopper."""
    import torch

    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    uses_cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    random_state = rng_state()
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(num_threads)
        torch.backends.cuda.enable_cudnn_sdp(uses_cudnn)
        set_rng_state(random_state)


def shut_down(core: Any, keeps_group: bool) -> None:
    """Stop an engine core. vLLM would also destroy torch's default process group, even one that it
    did not create, such as DeepSpeed's group of one process; `keeps_group` prevents that."""
    import torch.distributed as td

    destroy = td.destroy_process_group
    if keeps_group:
        td.destroy_process_group = lambda group=None: None if group is None else destroy(group)
    try:
        core.shutdown()
    finally:
        td.destroy_process_group = destroy


# ---- engine weights ------------------------------------------------------------------------------
# Loads weights into a running vLLM and reads them back, in its worker (`collective_rpc`).

ADAPTER_ID = 1
"""vLLM's number for the policy's adapter, the only one."""
MAX_NAMED = 8
"""Limit of names that a message lists."""

Lora = Mapping[str, "tuple[torch.Tensor, torch.Tensor]"]
"""Layer name -> (A [r, in], B [out, r] times alpha / r), in the engine's dtype, on its device."""

FullWeights = Mapping[str, "tuple[int, torch.Tensor]"]
"""A tensor's name in transformers -> (number of rows, `bit_sums` in the engine's dtype)."""


def put_lora(
    worker: Any, tensors: Mapping[str, torch.Tensor], lora_config: Mapping[str, Any], scale: float
) -> Lora:
    """Replace the adapter; returns what `lora_difference` must find in the worker.

    `tensors` must be clones that nobody else uses: vLLM multiplies B by alpha / r in place.
    `scale`: the policy's alpha / r. Raises RuntimeError if vLLM's scale differs, or if vLLM does
    not know a layer.
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
    expected = {}
    for name, lora in adapter.loras.items():
        if lora.scaling != scale:
            raise RuntimeError(
                f"vLLM would scale the adapter's layer {name} by {lora.scaling:g}, and the policy "
                f"scales it by {scale:g} (policy.lora.alpha / policy.lora.r): every completion "
                "would come from another policy. Hand over the policy's own lora_config, "
                "unchanged"
            )
        expected[name] = (lora.lora_a.clone(), lora.lora_b * scale)
    manager.remove_adapter(ADAPTER_ID)
    manager.add_adapter(adapter)
    manager.activate_adapter(ADAPTER_ID)
    return expected


def lora_difference(worker: Any, expected: Lora) -> str:
    """Names the layers whose LoRA slots, which the forward uses, differ from `expected` in any bit;
    '' if none. Compared on the device: a hash would copy the whole adapter to the host."""
    import torch

    slots = _slots(worker)
    if unknown := expected.keys() - slots.keys():
        return f"no layer {min(unknown)}"
    differs = []
    for name, (slot_a, slot_b) in slots.items():
        # A layer that was not sent must be zero: an adapter of rank 0.
        a, b = expected.get(name, (slot_a[:0], slot_b[:, :0]))
        rank = a.shape[0]
        same = _bits_equal(slot_a[:rank], a) & _bits_equal(slot_b[:, :rank], b)
        # A slot has vLLM's largest rank; its values beyond this adapter's rank must be zero.
        differs.append(~same | slot_a[rank:].any() | slot_b[:, rank:].any())
    return _message(list(compress(slots, torch.stack(differs).tolist())), "layers")


def full_sums(worker: Any, tensors: Iterable[tuple[str, torch.Tensor]]) -> FullWeights:
    """What the worker must hold of `tensors` after loading them; those not located are left out."""
    model = worker.model_runner.get_model()
    expected = {}
    for name, tensor in tensors:
        if location := _locate(model, name):
            layer, kind, _ = location
            target = getattr(layer, kind)
            expected[name] = (len(tensor), _value_sums(tensor.to(target.device, target.dtype)))
    return expected


def full_difference(worker: Any, expected: FullWeights) -> str:
    """The tensors in which the worker's model differs from `expected`; '' if none."""
    import torch

    model = worker.model_runner.get_model()
    read = lru_cache(maxsize=1)(_read)  # the parts of a fused matrix come one after the other
    differs = []
    for name, (num_rows, sums) in expected.items():
        location = _locate(model, name)
        assert location is not None, name
        layer, kind, first_row = location
        # vLLM pads a vocabulary: more rows may follow the last one that was sent.
        loaded = read(layer, kind)[first_row : first_row + num_rows]
        differs.append((_value_sums(loaded) != sums).any())
    names = compress(expected, torch.stack(differs).tolist()) if differs else ()
    return _message(list(names), "tensors")


def parameter_sums(worker: Any) -> Mapping[str, torch.Tensor]:
    """`bit_sums` of every parameter, including the weights under an adapter."""
    parameters = worker.model_runner.get_model().named_parameters()
    return {name: bit_sums(parameter) for name, parameter in parameters}


def parameter_difference(worker: Any, before: Mapping[str, torch.Tensor]) -> str:
    """Names the parameters that changed since `parameter_sums` gave `before`; '' if none."""
    import torch

    now = parameter_sums(worker)
    differs = torch.stack([(now[name] != sums).any() for name, sums in before.items()])
    return _message(list(compress(before, differs.tolist())), "parameters")


def _locate(model: Any, name: str) -> tuple[Any, str, int] | None:
    """(layer, parameter's name, first row) where the model keeps a tensor; None if unknown."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is not None:
        name = mapper.get_rename_mapper().map_name(name)
    path, _, kind = name.rpartition(".")
    parent, _, part = path.rpartition(".")
    try:
        layers = dict(model.get_submodule(parent).named_children())
    except AttributeError:
        layers = {}
    for fused, parts in getattr(model, "packed_modules_mapping", {}).items():
        if part in parts and part not in layers and fused in layers:
            first_row = sum(layers[fused].output_sizes[: parts.index(part)])
            return layers[fused], kind, first_row
    layer = layers.get(part)
    return None if getattr(layer, kind, None) is None else (layer, kind, 0)


def _read(layer: Any, kind: str) -> torch.Tensor:
    """A layer's parameter as the forward uses it; matrices that vLLM has repacked (on a CPU) are
    read by multiplying with the identity, which is exact."""
    import torch
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    parameter: torch.Tensor = getattr(layer, kind).data
    # An LM head keeps its weight and also a packed copy, which it multiplies with.
    is_packed = parameter.numel() == 0 or isinstance(layer, ParallelLMHead)
    if kind != "weight" or not is_packed or not hasattr(layer, "cpu_linear"):
        return parameter
    width = layer.embedding_dim if isinstance(layer, ParallelLMHead) else layer.input_size
    identity = torch.eye(width, dtype=parameter.dtype)
    columns: torch.Tensor = layer.cpu_linear(identity, parameter, None)
    return columns.T


def _value_sums(tensor: torch.Tensor) -> torch.Tensor:
    """`bit_sums`. On a CPU, subnormal numbers and -0.0 are first set to 0.0, because a product with
    the identity does not always keep them."""
    import torch

    if tensor.device.type == "cpu":
        tensor = tensor.where(tensor.abs() >= torch.finfo(tensor.dtype).tiny, 0)
    return bit_sums(tensor)


def _message(names: Sequence[str], kind: str) -> str:
    if not names:
        return ""
    others = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"other weights in {len(names)} {kind}: {', '.join(names[:MAX_NAMED])}{others}"


def _slots(worker: Any) -> Lora:
    """Linear layer's name -> its slot's (A [max_rank, in], B [out, max_rank])."""
    manager = worker.model_runner.lora_manager._adapter_manager
    if ADAPTER_ID not in manager.lora_index_to_id:
        return {}
    slot = manager.lora_index_to_id.index(ADAPTER_ID)
    # Embeddings and the head, which are never adapted, have one tensor instead of a tuple.
    return {
        name: (layer.lora_a_stacked[part][slot, 0], layer.lora_b_stacked[part][slot, 0])
        for packed_name, layer in manager.modules.items()
        if isinstance(getattr(layer, "lora_a_stacked", None), tuple)
        for part, name in enumerate(manager.packed_modules.get(packed_name, [packed_name]))
    }


def _bits_equal(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """[] bool, on the tensors' device; -0.0 and 0.0 differ, a NaN equals itself."""
    import torch

    integers = {2: torch.int16, 4: torch.int32}[first.element_size()]
    return (first.view(integers) == second.view(integers)).all()
