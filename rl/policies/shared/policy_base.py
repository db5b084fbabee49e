"""What every policy of this room has, whatever its model, and its keys."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence, Set
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

from typing_extensions import TypeVar

from rl.api.plug import ModelFiles, PlacedConfig, too_old, unread
from rl.api.policy import Decoder, LoraSection, PolicyConfig
from rl.api.types import Completion, Prompt, Row, TokenBatch
from rl.config.paths import not_a_file
from rl.config.schema import RunConfig
from rl.files.adapter_base import ADAPTER_CONFIG, read_config
from rl.files.model_files import model_problems
from rl.files.weights import align_weights
from rl.meter.flops import STAGES, prefix_tree_pairs
from rl.policies.shared.trained_weights import TrainedWeights
from rl.text.untrusted import shown

ADAPTER_FILES: Mapping[str, Any] = {
    "config": ADAPTER_CONFIG,
    "weights": ("adapter_model.safetensors", "adapter_model.bin"),
}


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


class TrainedPolicy(TrainedWeights[TrainedConfigT]):
    """Extended by a policy, which sets `module` and `prompts`."""

    model_types: ClassVar[Set[str]]
    """What `model_type` of its models' config.json may be."""
    model_classes: ClassVar[Set[str]]
    """What their `architectures` may be, classes of transformers."""
    prompts: Any
    """Has a `collate(rows, device)` and a `completion_ids(text)`."""

    @classmethod
    def reads_from(cls, config: TrainedConfigT) -> Sequence[str]:
        """Its `model_path`."""
        return [config.model_path]

    @classmethod
    def problems(cls, config: TrainedConfigT, run: RunConfig) -> list[str]:
        """What is wrong across fields, each with its key and remedy; [] when all is well."""
        found = []
        adapter = config.adapter_path
        if adapter and not_a_file(Path(adapter, ADAPTER_CONFIG)):
            found.append(f"adapter_path: {shown(repr(adapter), 300)} holds no {ADAPTER_CONFIG}")
        elif adapter:
            try:
                found += _unfit(read_config(Path(adapter)), config.lora)
                found += model_problems([ModelFiles("adapter_path", adapter, **ADAPTER_FILES)])
            except ValueError as error:
                found.append(f"adapter_path: {error}")
        if adapter and config.lora is None:
            found.append("adapter_path: full fine-tuning (lora: null) trains no adapter; drop one")
        half_on_cuda = config.dtype != "float32" and config.device != "cpu"
        if config.attn_implementation == "varlen" and not half_on_cuda:
            found.append(
                "attn_implementation: 'varlen' needs bfloat16 or float16 weights on a CUDA device, "
                f"not dtype {config.dtype} on device {config.device!r}; use 'auto'"
            )
        if config.lora is not None:
            known = cls.adaptable(config)
            found += [
                f"lora.target_modules: {name!r} is no linear layer that is adapted; known: "
                + ", ".join(sorted(known))
                for name in config.lora.target_modules
                if name not in known
            ]
            if not config.lora.target_modules:
                found.append("lora.target_modules: empty; name layers, or train all (lora: null)")
        return found

    @classmethod
    def device_problems(
        cls, config: TrainedConfigT, policy: PlacedConfig, capability: float | None
    ) -> Iterable[str]:
        """Of the flash kernels (`FLASH_CAPABILITY` in `rl/algorithm/attention_kernels.py`)."""
        if config.attn_implementation == "varlen":
            yield from too_old(
                capability or 0.0, 8.0, "attn_implementation: 'varlen'", "use 'auto'"
            )

    @classmethod
    def adaptable(cls, config: TrainedConfigT) -> Set[str]:
        """Names of the linear layers that `lora.target_modules` may name."""
        return {name for stage in STAGES for name in stage}

    @classmethod
    def no_effect(cls, config: TrainedConfigT) -> Iterable[str]:
        yield from super().no_effect(config)
        if Path(config.model_path).is_dir():
            yield from unread(config, "revision", "model_path is a folder")
        if config.lora is not None and config.adapter_path:
            keys = "target_modules init_seed"
            yield from unread(config.lora, keys, "adapter_path brings its own", at="lora.")

    @classmethod
    def save_prompt_files(cls, config: TrainedConfigT, folder: Path) -> None:
        """What its prompts need beside weights: the tokenizer."""
        cls.loading.load_tokenizer(config).save_pretrained(folder)

    def _ready(self, model: Any) -> Any:
        """A loaded model as it is trained: adapted, on the policy's device. Raises ValueError for
        one of another type, which only loading it may tell."""
        from rl.policies.shared.recomputing import spare_activations

        if (found := model.config.model_type) not in self.model_types:
            raise ValueError(
                f"policy.model_path: {shown(repr(self.config.model_path), 300)} is a {found!r}, "
                f"which policy.type {self.config.type!r} does not load; set the type that does"
            )
        model = self.loading.adapt(model, self.config, self.setup.seed).to(self.device)
        align_weights(model, self.device)
        spare_activations(model, self.setup.gradient_checkpointing)
        return model

    @cached_property
    def _overlay(self) -> tempfile.TemporaryDirectory[str]:
        """Where an engine's folder may be put together; lives as long as the policy."""
        return tempfile.TemporaryDirectory(prefix="policy-")

    def encode_completion(self, text: str) -> Completion:
        """`text` as if the policy had written it and stopped; its sampler log-probs are zeros."""
        ids = self.prompts.completion_ids(text)
        return Completion(ids, (0.0,) * len(ids), "stop")

    def collate(self, rows: Sequence[Row]) -> TokenBatch:
        batch: TokenBatch = self.prompts.collate(rows, self.device)
        return batch

    def train_flops(self, prompt_len: int, completion_lens: Sequence[int]) -> float:
        """See `rl.api.policy.Policy`; the vision tower is left out."""
        sizes, num_completed = self.module.sizes, sum(completion_lens)
        layers = prompt_len + num_completed, prefix_tree_pairs(prompt_len, completion_lens)
        head_passes = 3 if self.config.lora is None else 2
        return float(
            sizes.forward_flops(*layers)
            + sizes.backward_flops(*layers)
            + head_passes * sizes.head_flops(num_completed)
        )

    def decoder(self, prompts_P: Sequence[Prompt], num_rows: int) -> Decoder:
        from rl.policies.shared.decoder import PackedDecoder

        batch = self.collate([(prompt, ()) for prompt in prompts_P])
        return PackedDecoder(self.module, batch, num_rows)

    def _save_rest(self, path: Path) -> None:
        self.module.base_model.config.to_json_file(path / "config.json")
        self.prompts.tokenizer.save_pretrained(path)


def _unfit(adapter_config: Mapping[str, Any], lora: LoraSection | None) -> list[str]:
    """The keys of `lora` that an adapter's own config contradicts."""
    names = {"r": "r", "alpha": "lora_alpha", "dropout": "lora_dropout"}
    return [
        f"lora.{key}: {getattr(lora, key):g} given, but adapter_path's is {adapter_config[name]}: "
        "make them equal"
        for key, name in names.items()
        if lora is not None and adapter_config.get(name, getattr(lora, key)) != getattr(lora, key)
    ]
