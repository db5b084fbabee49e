"""Starts and stops vLLM inside the trainer's process without changing the process's state."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rl.seeds import rng_state, set_rng_state

GRID = "image_grid"
"""Key of the image grid (h, w) in `SamplingParams.extra_args`; without it any token may follow."""
VOCABULARY = "image_vocabulary"
"""Key of the fields of `ImageVocabulary` in the engine's `additional_config`."""
SERVED_AS = {"Emu3ForCausalLM": "LlamaForCausalLM"}
"""Architecture that vLLM does not list -> vLLM's class that computes the same."""
OURS = {"Qwen3VLForConditionalGeneration": ("rl.engines.vllm.deepstack", "Qwen3VLWithDeepstack")}
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
        if hasattr(lazy, "module_name"):
            module, name = OURS.get(architecture, (lazy.module_name, lazy.class_name))
            model_class = getattr(importlib.import_module(module), name)
            ModelRegistry.register_model(architecture, model_class)


def multiply_by_one_adapter() -> None:
    """On a CPU: compute adapters with `OneAdapter` instead of vLLM's kernel."""
    from vllm.platforms import current_platform

    from rl.engines.vllm.one_adapter import OneAdapter

    name = f"{OneAdapter.__module__}.{OneAdapter.__name__}"
    type(current_platform).get_punica_wrapper = classmethod(lambda _: name)


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
