"""What every policy of this room has: settings out of its section, weights that come and go.

What: `TrainedPolicy`, the part of `rl.api.contracts.Policy` that does not depend on the model. What
not: prompts and what a completion means (each policy), the weights themselves
(`trained_weights.py`). Called by the policies, which extend it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rl.api.types import PolicyWeights, Row, TokenBatch
from rl.files.weights import align_weights

if TYPE_CHECKING:
    import torch

    from rl.policies.shared.attention_kernels import Kernel
    from rl.policies.shared.trained_weights import TrainedWeights


def attention_problems(config: Any) -> list[str]:
    """Why the section's attention kernel cannot run, as far as the section tells."""
    if config.attn_implementation != "varlen":
        return []
    if config.dtype == "float32" or config.device == "cpu":
        return [
            "attn_implementation: 'varlen' needs bfloat16 or float16 weights on a CUDA device, not "
            f"dtype {config.dtype} on device {config.device!r}; use 'auto'"
        ]
    return []


class TrainedPolicy:
    """Extended by a policy, which sets `module` and `_weights`."""

    module: Any
    _weights: TrainedWeights

    def __init__(self, config: Any, prompts: Any, max_completion_tokens: int, device: str) -> None:
        """`config`: the policy section; `prompts`: has a `collate(rows, device)`."""
        self.config = config
        self.prompts = prompts
        self.dtype = config.dtype
        self.device = device
        self.max_prompt_tokens = config.max_prompt_tokens
        self.max_completion_tokens = max_completion_tokens
        self._overlay: tempfile.TemporaryDirectory[str] | None = None

    def _on_device(self, model: Any, gradient_checkpointing: bool | Literal["mlp"]) -> Any:
        from rl.policies.shared.recomputing import spare_activations

        model = model.to(self.device)
        align_weights(model, self.device)
        spare_activations(model, gradient_checkpointing)
        return model

    def _kernel(self) -> Kernel:
        """As the section asks. Raises ValueError where it does not run here."""
        import torch

        from rl.policies.shared.attention_kernels import choose_kernel

        dtype = getattr(torch, self.dtype)
        return choose_kernel(self.config.attn_implementation, self.device, dtype)

    def _overlay_folder(self) -> Path:
        """Where a sampler's folder may be put together; lives as long as the policy."""
        self._overlay = self._overlay or tempfile.TemporaryDirectory(prefix="policy-")
        return Path(self._overlay.name)

    @property
    def lora_rank(self) -> int | None:
        """Rank of the trained adapter; None under full fine-tuning."""
        return self.config.lora.r if self.config.lora else None

    def collate(self, rows: Sequence[Row]) -> TokenBatch:
        """See the prompts' `collate`; on the policy's device."""
        batch: TokenBatch = self.prompts.collate(rows, self.device)
        return batch

    def reference(self) -> AbstractContextManager[None]:
        """See `TrainedWeights.reference`."""
        return self._weights.reference()

    def merged_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `TrainedWeights.merged`."""
        return self._weights.merged()

    def export_weights(self, tensors: Mapping[str, torch.Tensor], version: int) -> PolicyWeights:
        """See `TrainedWeights.export`."""
        return self._weights.export(tensors, version)
