"""One policy's trainable weights: as they were before training, and as they leave."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl.api.policy import Policy, PolicyConfigT
from rl.api.types import PolicyWeights
from rl.files.adapter_base import noted
from rl.files.weights import align_weights, fingerprint
from rl.policies.shared import adapters
from rl.ranks.sharded import is_sharded

if TYPE_CHECKING:
    import torch


class TrainedWeights(Policy[PolicyConfigT]):
    """Base of policies whose module keeps its (PEFT) model under `model`."""

    loading: Any
    """Module with `base`, `load_model` and `adapt`, each a function of a config section."""
    embedding: str
    """Name of the weight that is also the head's where the two are tied."""

    module: Any
    _base_state: dict[str, torch.Tensor] | None = None

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Inside, the module is the policy as it was before training.

        LoRA: the adapter is off. Full fine-tuning: the checkpoint's weights, kept on the CPU from
        the first use on, stand in for the trained ones; ValueError under ZeRO-3, which holds no
        whole tensors to exchange.
        """
        if self.module.adapted:
            with self.module.model.disable_adapter():
                yield
            return
        if is_sharded(self.module):
            raise ValueError(
                "full fine-tuning under ZeRO-3 has no reference weights at hand: set "
                "algorithm.kl_coeff = 0 and policy.conditioning = 'policy', or zero_stage <= 2"
            )
        base = self._base()
        trained = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        held = {name: parameter.data for name, parameter in trained.items()}
        try:
            for name, parameter in trained.items():
                parameter.data = base[name.removeprefix(adapters.WRAPPER)].to(parameter)
            yield
        finally:
            for name, parameter in trained.items():
                parameter.data = held[name]

    def _base(self) -> dict[str, torch.Tensor]:
        if self._base_state is None:
            base = self.loading.load_model(self.config)
            align_weights(base, next(self.module.parameters()).device.type)
            self._base_state = base.state_dict()
        return self._base_state

    def export_weights(self, tensors: Mapping[str, torch.Tensor], version: int) -> PolicyWeights:
        """An adapter as copies, since an engine scales its matrices in place. Full weights in the
        policy's dtype, and where they have it already as they are: a second copy of a large model
        would not fit beside an engine that is awake. Read them before the next update."""
        named = self._outside_names(tensors)
        return PolicyWeights(
            kind="lora" if self.module.adapted else "full",
            tensors=named,
            lora_config=self._lora_config() if self.module.adapted else None,
            version=version,
            fingerprint=fingerprint(named),
        )

    def save_pretrained(self, folder: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """LoRA: a PEFT adapter. Full: a transformers folder with what its prompts need."""
        named = self._outside_names(tensors)
        if self.module.adapted:
            adapters.write_adapter(folder, named, self._lora_config())
            return
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        self._save_rest(path)
        adapters.write_safetensors(path / "model.safetensors", {**self._base(), **named})

    @abstractmethod
    def _save_rest(self, path: Path) -> None:
        """What a transformers folder holds beside the weights."""

    def _outside_names(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if self.module.adapted:
            return {adapters.peft_name(n): t.detach().clone() for n, t in tensors.items()}
        import torch

        dtype = getattr(torch, self.config.dtype)
        named = {
            name.removeprefix(adapters.WRAPPER): tensor.detach().to(dtype)
            for name, tensor in tensors.items()
        }
        if self.module.base_model.config.tie_word_embeddings:
            # An engine keeps its own head even where the weights are tied.
            named["lm_head.weight"] = named[self.embedding]
        return named

    def _lora_config(self) -> dict[str, Any]:
        config = adapters.plain_config(self.module.model.peft_config["default"])
        model_class = type(self.module.base_model).__name__
        return {**config, **noted(self.loading.base(self.config), model_class)}
