"""The base class of the policies in `rl/policies`, and the config keys they share."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from typing_extensions import TypeVar

from rl.api.plugin import ModelFiles, PlacedConfig, too_old, unread
from rl.api.policy import Decoder, Policy, PolicyConfig
from rl.api.types import Completion, PolicyWeights, Prompt, Row, TokenBatch
from rl.config.paths import not_a_file
from rl.config.schema import RunConfig
from rl.files.adapter_base import ADAPTER_CONFIG, Base, noted, read_config
from rl.files.model_files import model_problems
from rl.files.weights import align_weights, fingerprint
from rl.meter.flops import STAGES, prefix_tree_pairs
from rl.policies.shared.model_loading import adapt
from rl.policies.shared.packing import pack, positions
from rl.ranks.dist import is_sharded
from rl.text.untrusted import shown

if TYPE_CHECKING:
    import torch

WRAPPER = "model."
"""Where the policy's module keeps the model: the prefix of its parameter names."""
ADAPTER_KEYS = {"r": "r", "alpha": "lora_alpha", "dropout": "lora_dropout"}
"""Keys of `lora`, and their names in an adapter's own config."""
ADAPTER_FILES: Mapping[str, Any] = {
    "config": ADAPTER_CONFIG,
    "weights": ("adapter_model.safetensors", "adapter_model.bin"),
}


class TrainedPolicyConfig(PolicyConfig):
    """Keys of every policy in `rl/policies`."""

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
    """Base class of a policy, which sets `module` and `prompts`. The module holds its (PEFT) model
    as `model`."""

    model_types: ClassVar[Set[str]]
    """Accepted values of `model_type` in a model's config.json."""
    model_classes: ClassVar[Set[str]]
    """Accepted values of `architectures` there: names of transformers classes."""
    loading: Any
    """Module with `load_tokenizer` and `load_model`, each a function of a config section."""
    embedding: str
    """Name of the embedding weight, which is also the head's weight if the two are tied."""
    vocabulary_slices: Sequence[int] = ()
    """Bounds of slices of the vocabulary, where each token's softmax runs over its own slice; ():
    one softmax over all ids except the banned ones."""

    module: Any
    prompts: Any
    """Has a `tokenizer` and a `completion_ids(text)`."""

    @classmethod
    def base(cls, config: TrainedConfigT) -> Base:
        """The weights that training starts from."""
        return Base(config.model_path, config.revision)

    @classmethod
    def reads_from(cls, config: TrainedConfigT) -> Sequence[str]:
        return [config.model_path]

    @classmethod
    def problems(cls, config: TrainedConfigT, run: RunConfig) -> list[str]:
        found = []
        adapter = config.adapter_path
        if adapter and not_a_file(Path(adapter, ADAPTER_CONFIG)):
            found.append(f"adapter_path: {shown(repr(adapter), 300)} holds no {ADAPTER_CONFIG}")
        elif adapter:
            try:
                written = read_config(Path(adapter))
                lora = {} if config.lora is None else config.lora.model_dump()
                found += [
                    f"lora.{key}: {lora[key]:g} given, but adapter_path's is {written[name]}: "
                    "make them equal"
                    for key, name in ADAPTER_KEYS.items()
                    if key in lora and written.get(name, lora[key]) != lora[key]
                ]
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
        """GPU too old for flash (`FLASH_CAPABILITY` in `rl/algorithm/attention_kernels.py`)."""
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

    def _ready(self, model: Any, within: str) -> Any:
        """Prepares a loaded model for training: adds the adapter (see `adapt` for `within`) and
        moves the model to the policy's device. Raises ValueError for a model of another type: the
        type of a hub model is known only once it is loaded."""
        from rl.policies.shared.recomputing import spare_activations

        if (found := model.config.model_type) not in self.model_types:
            raise ValueError(
                f"policy.model_path: {shown(repr(self.config.model_path), 300)} is a {found!r}, "
                f"which policy.type {self.config.type!r} does not load; set the type that does"
            )
        config = self.config
        model = adapt(model, config.lora, config.adapter_path, within, self.setup.seed)
        model = model.to(self.device)
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
        """Groups packed into one row on the policy's device, with their `position_ids` [..., S]."""
        import torch

        ids, groups, prompts = pack(rows)
        packed = positions(groups, [self._positions(prompt) for prompt in prompts])
        return TokenBatch(
            input_ids=torch.tensor(ids, device=self.device),
            groups=groups,
            model_inputs={
                "position_ids": packed.to(self.device),
                **self._model_inputs(rows, prompts),
            },
        )

    def _positions(self, prompt: Prompt) -> torch.Tensor:
        """[..., P] position ids of a prompt's tokens."""
        import torch

        return torch.arange(len(prompt.token_ids))

    def _model_inputs(self, rows: Sequence[Row], prompts: Sequence[Prompt]) -> Mapping[str, Any]:
        """What else the module reads of these rows; `prompts`: one for each group."""
        return {}

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

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Inside, the module is the policy as it was before training.

        LoRA: the adapter is off. Full fine-tuning: the initial checkpoint's weights, kept on the
        CPU from the first use on, replace the trained ones. Raises ValueError under ZeRO-3, which
        holds no whole tensors to swap.
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
        base = self._base
        trained = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        held = {name: parameter.data for name, parameter in trained.items()}
        try:
            for name, parameter in trained.items():
                parameter.data = base[name.removeprefix(WRAPPER)].to(parameter)
            yield
        finally:
            for name, parameter in trained.items():
                parameter.data = held[name]

    @cached_property
    def _base(self) -> dict[str, torch.Tensor]:
        """The weights before training, on the CPU."""
        base = self.loading.load_model(self.config)
        align_weights(base, next(self.module.parameters()).device.type)
        return dict(base.state_dict())

    def export_weights(self, tensors: Mapping[str, torch.Tensor], version: int) -> PolicyWeights:
        """LoRA: copies of the adapter, because an engine scales its matrices in place. Full: the
        weights in the policy's dtype, not copied if they already have it, because a second copy
        of a large model would not fit beside an awake engine. Read them before the next update."""
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
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        if self.module.adapted:
            # Makes no collective calls, unlike transformers' own `save_pretrained`.
            config = {**self._lora_config(), "inference_mode": True}
            text = json.dumps(config, indent=2, sort_keys=True) + "\n"
            (path / ADAPTER_CONFIG).write_text(text)
            _write_safetensors(path / "adapter_model.safetensors", named)
            return
        self._save_rest(path)
        _write_safetensors(path / "model.safetensors", {**self._base, **named})

    def _save_rest(self, path: Path) -> None:
        """What a transformers folder holds beside the weights."""
        self.module.base_model.config.to_json_file(path / "config.json")
        self.prompts.tokenizer.save_pretrained(path)

    def _outside_names(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if self.module.adapted:
            # `model.base_model...lora_A.default.weight`: PEFT's own names lack `.default`.
            return {
                name.removeprefix(WRAPPER).replace(".default.", "."): tensor.detach().clone()
                for name, tensor in tensors.items()
            }
        import torch

        dtype = getattr(torch, self.config.dtype)
        named = {
            name.removeprefix(WRAPPER): tensor.detach().to(dtype)
            for name, tensor in tensors.items()
        }
        if self.module.base_model.config.tie_word_embeddings:
            # An engine keeps its own head even where the weights are tied.
            named["lm_head.weight"] = named[self.embedding]
        return named

    def _lora_config(self) -> dict[str, Any]:
        """PEFT's config as JSON takes it (sets become sorted lists), with the adapter's base."""
        written = self.module.model.peft_config["default"].to_dict()
        config = {k: sorted(v) if isinstance(v, set) else v for k, v in written.items()}
        return {**config, **noted(self.base(self.config), type(self.module.base_model).__name__)}


def _write_safetensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Clones first: safetensors refuses tensors that share memory (tied weights)."""
    from safetensors.torch import save_file

    whole = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    save_file(whole, path, metadata={"format": "pt"})
