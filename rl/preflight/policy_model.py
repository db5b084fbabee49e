"""The shape of a policy's language model, and what a token of it takes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rl.meter.flops import STAGES, ModelShape, Recompute

ADAPTABLE = tuple(name for stage in STAGES for name in stage)
"""The linear layers of a decoder's layer."""


@dataclass(frozen=True)
class PolicyModel(ModelShape):
    """Shape of a policy's language model."""

    params: float
    """All of them, embeddings, head and vision tower included."""
    tower_params: float = 0.0
    """Of these, the vision tower's."""
    head_norms: bool = False
    """Whether queries and keys are normed head by head (Qwen3)."""
    deepstack_levels: int = 0
    """First layers that take features of pictures besides, of which an engine keeps buffers."""

    def lora_params(self, rank: int, modules: Sequence[str]) -> int:
        """Parameters of the adapters on these linear layers; names outside the language model's
        seven count nothing."""
        sides = (sum(self.shape(module)) for module in modules if module in ADAPTABLE)
        return self.num_layers * rank * sum(sides)

    def engine_tensors(self) -> list[float]:
        """Parameters of each tensor of the language model as an inference engine fuses them;
        embedding and head as halves of what is in no layer."""
        of = {name: math.prod(self.shape(name)) for name in ADAPTABLE}
        layer = [
            of["q_proj"] + of["k_proj"] + of["v_proj"],
            of["o_proj"],
            of["gate_proj"] + of["up_proj"],
            of["down_proj"],
        ]
        rest = self.params - self.tower_params - self.num_layers * sum(layer)
        return [*layer * self.num_layers, rest / 2, rest / 2]

    def kv_bytes(self, bytes_per_value: int) -> int:
        """Key-value cache of one token."""
        return self.num_cached * bytes_per_value

    def kept_bytes(
        self, adapted: Sequence[str] | None, bytes_per_value: int, checkpointing: Recompute
    ) -> int:
        """Of one token, what a forward keeps for its backward, all layers.

        `adapted`: the linear layers that LoRA trains; None: full fine-tuning.
        """
        around, inside = self._layer_bytes(adapted, bytes_per_value)
        state = self.width * bytes_per_value
        of_layer = {False: around + inside, "mlp": around + state, True: state}
        return self.num_layers * of_layer[checkpointing]

    def working_bytes(
        self, adapted: Sequence[str] | None, bytes_per_value: int, checkpointing: Recompute
    ) -> int:
        """Of one token, a layer's backward: what is recomputed, and its MLP's gradients."""
        around, inside = self._layer_bytes(adapted, bytes_per_value)
        recomputed = {False: 0, "mlp": inside, True: around + inside}
        return recomputed[checkpointing] + self.mlp_bytes(bytes_per_value)

    def mlp_bytes(self, bytes_per_value: int) -> int:
        """Of one token, gate, up and product: what a layer holds at most while it runs."""
        return 3 * self.mlp_width * bytes_per_value

    def _layer_bytes(self, adapted: Sequence[str] | None, bytes_per_value: int) -> tuple[int, int]:
        """(around, inside the MLP): what a layer keeps of one token (measured, see the test).

        The inputs of both norms; of attention queries, keys, values and result, and the inputs of
        head norms; of the MLP gate, up and the activation; of trained layers their input, if it is
        none of these.
        """
        trains = ADAPTABLE if adapted is None else adapted
        wide, narrow = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        around = 2 * self.width + 2 * wide + 2 * narrow
        around += wide + narrow if self.head_norms else 0
        around += self.width if {"q_proj", "k_proj", "v_proj"} & set(trains) else 0
        inside = 3 * self.mlp_width
        inside += self.width if {"gate_proj", "up_proj"} & set(trains) else 0
        inside += self.mlp_width if "down_proj" in trains else 0
        return around * bytes_per_value, inside * bytes_per_value


_QWEN_7B = PolicyModel(28, 3584, 18944, 28, 4, 128, 8.29e9, 0.68e9)
_QWEN3 = {
    "2B": PolicyModel(28, 2048, 6144, 16, 8, 128, 2.13e9, 0.41e9, True, 3),
    "4B": PolicyModel(36, 2560, 9728, 32, 8, 128, 4.44e9, 0.42e9, True, 3),
    "8B": PolicyModel(36, 4096, 12288, 32, 8, 128, 8.77e9, 0.58e9, True, 3),
}
_EMU3 = PolicyModel(32, 4096, 14336, 32, 8, 128, 8.49e9)
KNOWN: Mapping[str, PolicyModel] = {
    "Qwen/Qwen2.5-VL-3B-Instruct": PolicyModel(36, 2048, 11008, 16, 2, 128, 3.75e9, 0.67e9),
    "Qwen/Qwen2.5-VL-7B-Instruct": _QWEN_7B,
    "Qwen/Qwen2.5-VL-72B-Instruct": PolicyModel(80, 8192, 29568, 64, 8, 128, 73.4e9, 0.70e9),
    **{
        f"Qwen/Qwen3-VL-{size}-{kind}": model
        for size, model in _QWEN3.items()
        for kind in ("Instruct", "Thinking")
    },
    "BAAI/Emu3-Gen": _EMU3,
    "BAAI/Emu3-Stage1": _EMU3,
    "mair-lab/sft-simple": _EMU3,
    "mair-lab/thinking-sft-simple": _EMU3,
    "Image-Editing/Emu3-Base-SFT-without_cot-May06_mixed_gc_lr1e-4-checkpoint-4800": _EMU3,
    "Image-Editing/Emu3-Base-SFT-without_cot-May07_mixed_gc_post_lr1e-4-checkpoint-1200": _EMU3,
}
"""Models that are usually on the hub rather than on the laptop that checks the config."""
