"""What every policy of this room has: settings out of its section, weights that come and go.

What: `TrainedPolicy`, the part of `rl.api.policy.Policy` that does not depend on the model, and its
keys. What not: prompts and what a completion means (each policy), the weights themselves
(`trained_weights.py`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import TypeVar

from rl.api.policy import Decoder, Policy, PolicyConfig, PolicySetup
from rl.api.types import Completion, PolicyWeights, Prompt, Row, TokenBatch
from rl.config.schema import RunConfig
from rl.files.weights import align_weights
from rl.policies.shared.lora import adapter_problems

if TYPE_CHECKING:
    import torch

    from rl.policies.shared.attention_kernels import Kernel
    from rl.policies.shared.trained_weights import TrainedWeights


class TrainedPolicyConfig(PolicyConfig):
    """Keys of every policy of this room."""

    model_path: str
    """Folder or hub id of the weights."""
    revision: str | None = None
    """Hub revision of model_path; null = newest."""
    adapter_path: str = ""
    """PEFT adapter folder to start from ('' = a fresh one); must fit `lora`."""
    attn_implementation: Literal["auto", "sdpa", "varlen"] = "auto"
    """Attention kernel of the trainer's packed rows: 'varlen' (flash attention, half precision on
    CUDA), 'sdpa' (everywhere), 'auto' = 'varlen' where it runs."""


TrainedConfigT = TypeVar("TrainedConfigT", bound=TrainedPolicyConfig, default=TrainedPolicyConfig)


class TrainedPolicy(Policy[TrainedConfigT]):
    """Extended by a policy, which sets `module`, `prompts` and `_weights`."""

    module: Any
    prompts: Any
    """Has a `collate(rows, device)` and a `completion_ids(text)`."""
    _weights: TrainedWeights

    def __init__(self, config: TrainedConfigT, setup: PolicySetup) -> None:
        super().__init__(config, setup)
        self._overlay: tempfile.TemporaryDirectory[str] | None = None

    @classmethod
    def reads_from(cls, config: TrainedConfigT) -> Sequence[str]:
        """Its `model_path`."""
        return [config.model_path]

    @classmethod
    def problems(cls, config: TrainedConfigT, run: RunConfig) -> list[str]:
        """What is wrong across fields, each with its key and remedy; [] when all is well."""
        found = adapter_problems(config.adapter_path, config.lora)
        half_on_cuda = config.dtype != "float32" and config.device != "cpu"
        if config.attn_implementation == "varlen" and not half_on_cuda:
            found.append(
                "attn_implementation: 'varlen' needs bfloat16 or float16 weights on a CUDA device, "
                f"not dtype {config.dtype} on device {config.device!r}; use 'auto'"
            )
        return found

    def _on_device(self, model: Any) -> Any:
        from rl.policies.shared.recomputing import spare_activations

        model = model.to(self.device)
        align_weights(model, self.device)
        spare_activations(model, self.setup.gradient_checkpointing)
        return model

    def _kernel(self) -> Kernel:
        """As the section asks. Raises ValueError where it does not run here."""
        import torch

        from rl.policies.shared.attention_kernels import choose_kernel

        dtype = getattr(torch, self.config.dtype)
        return choose_kernel(self.config.attn_implementation, self.device, dtype)

    def _overlay_folder(self) -> Path:
        """Where an engine's folder may be put together; lives as long as the policy."""
        self._overlay = self._overlay or tempfile.TemporaryDirectory(prefix="policy-")
        return Path(self._overlay.name)

    def encode_completion(self, text: str) -> Completion:
        """`text` as if the policy had written it and stopped; its sampler log-probs are zeros."""
        ids = self.prompts.completion_ids(text)
        return Completion(ids, (0.0,) * len(ids), "stop")

    def collate(self, rows: Sequence[Row]) -> TokenBatch:
        """See the prompts' `collate`; on the policy's device."""
        batch: TokenBatch = self.prompts.collate(rows, self.device)
        return batch

    def decoder(self, prompts_P: Sequence[Prompt], num_rows: int) -> Decoder:
        """See `PackedDecoder`."""
        from rl.policies.shared.decoder import PackedDecoder

        batch = self.collate([(prompt, ()) for prompt in prompts_P])
        return PackedDecoder(self.module, batch, num_rows)

    def reference(self) -> AbstractContextManager[None]:
        """See `TrainedWeights.reference`."""
        return self._weights.reference()

    def merged_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `TrainedWeights.merged`."""
        return self._weights.merged()

    def export_weights(self, tensors: Mapping[str, torch.Tensor], version: int) -> PolicyWeights:
        """See `TrainedWeights.export`."""
        return self._weights.export(tensors, version)

    def save_pretrained(self, folder: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """LoRA: a PEFT adapter. Full: a transformers folder with what its prompts need."""
        self._weights.save(folder, tensors, self._save_rest)

    def _save_rest(self, path: Path) -> None:
        """What a transformers folder holds beside the weights."""
        self.module.base_model.config.to_json_file(path / "config.json")
        self.prompts.tokenizer.save_pretrained(path)
