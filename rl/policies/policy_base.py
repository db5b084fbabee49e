"""What the trainable policies share: loading, training, saving, where a run starts from."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from typing_extensions import TypeVar

from rl.api.plugin import ModelFiles
from rl.api.policy import Decoder, LoraSection, Policy, PolicyConfig
from rl.api.types import Completion, PolicyWeights, Prompt, Row, TokenBatch
from rl.config.loading import is_folder, not_a_file
from rl.config.schema import RunConfig, Unread
from rl.meter import MATRICES, prefix_tree_pairs
from rl.model_files import (
    ADAPTER_CONFIG,
    Base,
    align_weights,
    file_here,
    fingerprint,
    is_hub_id,
    model_problems,
    noted,
    read_config,
)
from rl.policies.packing import pack, positions
from rl.printing import excerpt
from rl.ranks.dist import is_sharded
from rl.record.checkpoint import model_folder, steps_of

if TYPE_CHECKING:
    import torch

# ---- model loading -------------------------------------------------------------------------------
# Finds or downloads model files, and adds a LoRA adapter to a loaded model.

TEXT_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
"""Patterns of all files in a model's repository except weights and code."""


def local_folder(path: str, revision: str | None = None, patterns: list[str] | None = None) -> Path:
    """`path` if it is a folder, else a download of that hub id's files that match `patterns`."""
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(path, revision=revision, allow_patterns=patterns))


def folder_here(path: str, revision: str | None, names: Iterable[Sequence[str]]) -> Path | None:
    """The folder of a model's files, `path` itself or in the local cache, if it has one file of
    each of `names`; no other machine is asked."""
    files = [
        next(filter(None, (file_here(path, name, revision) for name in kinds)), None)
        for kinds in names
    ]
    return files[0].parent if files[0] is not None and all(files) else None


def load_tokenizer(config: Any) -> Any:
    """The tokenizer in a policy section's `model_path`. Raises OSError naming what is missing."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        config.model_path, revision=config.revision, trust_remote_code=False
    )


def link_files(folder: Path, overlay: Path, skip: Sequence[str] = ()) -> None:
    """Link files into `overlay`, except names that contain one of `skip` or that it already has."""
    for file in folder.iterdir():
        link = overlay / file.name
        if file.is_file() and not link.exists() and not any(part in file.name for part in skip):
            link.symlink_to(file.resolve())


def adapt(
    model: Any, lora: LoraSection | None, adapter_path: str, within: str = "", seed: int = 0
) -> Any:
    """Returns the model with a trainable LoRA, loaded from `adapter_path` or new, on the layers
    that `lora` names inside modules that match the regex `within` ('' = anywhere). Without `lora`,
    all weights become trainable. A new LoRA is initialised with the seed `lora.init_seed`, or with
    `seed` if that is None.

    Raises ValueError when no layer has a name of `lora.target_modules` (`TrainedPolicy.problems`
    refuses each unknown name), or when `adapter_path` holds tensors for other layers. The model
    must still be on the CPU.
    """
    if lora is None:
        return model.requires_grad_(True)
    if adapter_path:
        return _with_saved_adapter(model, adapter_path)
    import torch
    from peft import LoraConfig, get_peft_model

    names = list(lora.target_modules)
    # The vision tower's patch convolution has the same name as one of its linear layers.
    not_linear = [
        layer
        for layer, module in model.named_modules()
        if layer.rpartition(".")[2] in names and not isinstance(module, torch.nn.Linear)
    ]
    config = LoraConfig(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=rf"{within}\.({'|'.join(names)})" if within else names,
        exclude_modules=not_linear or None,
    )
    with torch.random.fork_rng(devices=[]):
        # Every rank starts from the same adapter, whatever its random state.
        torch.manual_seed(seed if lora.init_seed is None else lora.init_seed)
        return get_peft_model(model, config)


def _with_saved_adapter(model: Any, adapter_path: str) -> Any:
    """Raises ValueError unless tensors and layers match one to one: PEFT ignores tensors without a
    layer, and initialises layers without tensors at random."""
    from peft import PeftModel

    mapping = getattr(model, "_checkpoint_conversion_mapping", {})
    loading = {"is_trainable": True, "torch_device": "cpu", "key_mapping": mapping}
    subject = f"policy.adapter_path: {adapter_path}"
    remedy = "name an adapter that was trained on this model (policy.model_path), or drop the key"
    if (Path(adapter_path) / ADAPTER_CONFIG).is_file():
        read_config(Path(adapter_path))
    try:
        adapted = PeftModel.from_pretrained(model, adapter_path, **loading)
        # Load a second time: only this call returns the unexpected and missing keys.
        keys = adapted.load_adapter(adapter_path, "default", **loading)
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"{subject} does not fit: {excerpt(str(error), 300)}; {remedy}") from None
    if keys.unexpected_keys or keys.missing_keys:
        first = excerpt((keys.unexpected_keys or keys.missing_keys)[0], 200)
        raise ValueError(
            f"{subject} does not fit: {len(keys.unexpected_keys)} of its tensors belong to no "
            f"layer of the model, and {len(keys.missing_keys)} tensors of adapted layers are not "
            f"in it ({first}); {remedy}"
        )
    return adapted


# ---- policy base ---------------------------------------------------------------------------------
# The base class of the policies in `rl/policies`, and the config keys they share.

WRAPPER = "model."
"""Prefix of the model's parameter names in the policy's module."""
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
    revision: Annotated[str | None, Unread("model_path", is_folder)] = None
    """Hub revision of model_path; null = newest."""
    adapter_path: str = ""
    """PEFT adapter to start from: its folder, a run folder (its newest intact checkpoint) or one of
    a run's checkpoints; must fit `lora` and the base model. '' = a new one."""
    attn_implementation: Literal["auto", "sdpa"] = "auto"
    """Attention kernel of the trainer's packed rows: 'auto' is flash attention where it runs (half
    precision on CUDA) and elsewhere 'sdpa', plain attention."""


def _adapter_problems(config: TrainedPolicyConfig) -> list[str]:
    """Why the run cannot start from `adapter_path`."""
    shown = f"adapter_path: {excerpt(repr(config.adapter_path), 300)}"
    if config.lora is None:
        return ["adapter_path: needs lora; full fine-tuning (lora: null) has no adapter"]
    try:
        folder = model_folder(Path(config.adapter_path))
        if not not_a_file(folder / "config.json"):
            return [f"{shown} holds a whole model; start from it with policy.model_path={folder}"]
        if not_a_file(folder / ADAPTER_CONFIG):
            return [f"{shown} holds no {ADAPTER_CONFIG}, nor a checkpoint of a run"]
        saved = read_config(folder)
    except (ValueError, OSError) as error:
        return [f"adapter_path: {error}"]
    lora, base = config.lora.model_dump(), saved.get("base_model_name_or_path")
    errors = [
        f"lora.{key}: {lora[key]:g} given, but adapter_path's is {saved[name]}: make them equal"
        for key, name in ADAPTER_KEYS.items()
        if saved.get(name, lora[key]) != lora[key]
    ]
    # Folders may be copies of one model.
    if base != config.model_path and is_hub_id(f"{base}") and is_hub_id(config.model_path):
        errors.append(f"model_path: adapter_path was trained on {base!r}: make them equal")
    return [*errors, *model_problems([ModelFiles("adapter_path", str(folder), **ADAPTER_FILES)])]


TrainedConfigT = TypeVar("TrainedConfigT", bound=TrainedPolicyConfig, default=TrainedPolicyConfig)


class TrainedPolicy(Policy[TrainedConfigT]):
    """Base class of a policy. A subclass sets `prompts` and `module`; `module.model` is the (PEFT)
    model."""

    model_types: ClassVar[Set[str]]
    """Accepted values of `model_type` in a model's config.json."""
    model_classes: ClassVar[Set[str]]
    """Accepted values of `architectures` there: names of transformers classes."""
    loading: Any
    """Module with the functions `load_tokenizer(config)` and `load_model(config)`."""
    embedding: str
    """Name of the embedding weight, which is also the head's weight if the two are tied."""
    vocabulary_slices: Sequence[int] = ()
    """Bounds of slices of the vocabulary; each token's softmax runs over the slice that contains
    it. (): one softmax over all ids except the banned ones."""

    _start: Mapping[str, torch.Tensor] | None = None
    """The adapter that the run starts from, on the CPU; None: a new one, which changes nothing, or
    `setup.keeps_start` is False."""
    module: Any
    prompts: Any
    """Has a `tokenizer` and a `completion_ids(text)`."""

    @classmethod
    def base(cls, config: TrainedConfigT) -> Base:
        """The weights that training starts from."""
        return Base(config.model_path, config.revision)

    @classmethod
    def models(cls, config: TrainedConfigT) -> Sequence[ModelFiles]:
        kinds = (cls.model_types, cls.model_classes)
        return [ModelFiles("model_path", config.model_path, *kinds, revision=config.revision)]

    @classmethod
    def problems(cls, config: TrainedConfigT, run: RunConfig) -> Iterator[str]:
        if config.adapter_path and not steps_of(run.run_dir):  # a resume has its own copy
            yield from _adapter_problems(config)
        if config.lora is not None:
            adaptable = cls.adaptable(config)
            yield from (
                f"lora.target_modules: {name!r} is not a layer that LoRA can adapt; known: "
                + ", ".join(sorted(adaptable))
                for name in config.lora.target_modules
                if name not in adaptable
            )
            if not config.lora.target_modules:
                yield "lora.target_modules: empty; name layers, or train all (lora: null)"

    @classmethod
    def adaptable(cls, config: TrainedConfigT) -> Set[str]:
        """Names of the linear layers that `lora.target_modules` may name."""
        return set(MATRICES)

    @classmethod
    def save_prompt_files(cls, config: TrainedConfigT, folder: Path) -> None:
        """Save the files other than weights that prompts need: the tokenizer."""
        cls.loading.load_tokenizer(config).save_pretrained(folder)

    def _prepared(self, model: Any, within: str) -> Any:
        """Prepares a loaded model for training: adds the adapter (see `adapt` for `within`) and
        moves the model to the policy's device. Raises ValueError for a model of another type: the
        type of a hub model is known only once it is loaded."""
        from rl.policies.attention import spare_activations

        if (kind := model.config.model_type) not in self.model_types:
            raise ValueError(
                f"policy.model_path: {excerpt(repr(self.config.model_path), 300)} is a {kind!r}, "
                f"which policy.type {self.config.type!r} does not load; set the type that does"
            )
        adapter = self.start_adapter(self.config)
        model = adapt(model, self.config.lora, adapter, within, self.setup.seed)
        if adapter and self.setup.keeps_start:
            trained = ((n, p) for n, p in model.named_parameters() if p.requires_grad)
            self._start = {name: parameter.detach().clone() for name, parameter in trained}
        model = model.to(self.device)
        align_weights(model, self.device)
        spare_activations(model, self.setup.gradient_checkpointing)
        return model

    @classmethod
    def start_adapter(cls, config: TrainedConfigT) -> str:
        return str(model_folder(Path(config.adapter_path))) if config.adapter_path else ""

    @cached_property
    def _overlay(self) -> tempfile.TemporaryDirectory[str]:
        """Temporary folder in which `engine_folder` links files; deleted with the policy."""
        return tempfile.TemporaryDirectory(prefix="policy-")

    def encode_completion(self, text: str) -> Completion:
        """`text` as if the policy had written it and stopped, with log-probs of 0."""
        ids = self.prompts.completion_ids(text)
        return Completion(ids, (0.0,) * len(ids), "stop")

    def collate(self, rows: Sequence[Row]) -> TokenBatch:
        """Groups packed into one row on the policy's device, with their `position_ids` [..., S]."""
        import torch

        ids, groups, prompts = pack(rows)
        packed = positions(groups, [self._positions(prompt) for prompt in prompts])
        return TokenBatch(
            input_ids=torch.tensor(ids).to(self.device, non_blocking=True),
            groups=groups,
            model_inputs={
                "ids_on_host": torch.tensor(ids),
                "position_ids": packed.to(self.device, non_blocking=True),
                **self._model_inputs(rows, prompts),
            },
        )

    def _positions(self, prompt: Prompt) -> torch.Tensor:
        """[..., P] position ids of a prompt's tokens."""
        import torch

        return torch.arange(len(prompt.token_ids))

    def _model_inputs(self, rows: Sequence[Row], prompts: Sequence[Prompt]) -> Mapping[str, Any]:
        """The module's other inputs for these rows; `prompts`: one for each group."""
        return {}

    def train_flops(self, prompt_len: int, completion_lens: Sequence[int]) -> float:
        """As in `rl.api.policy.Policy`, without the vision tower."""
        sizes, num_completed = self.module.sizes, sum(completion_lens)
        layers = prompt_len + num_completed, prefix_tree_pairs(prompt_len, completion_lens)
        head_passes = 3 if self.config.lora is None else 2
        return float(
            sizes.forward_flops(*layers)
            + sizes.backward_flops(*layers)
            + head_passes * sizes.head_flops(num_completed)
        )

    def engine_folder(self) -> str:
        path, revision = self.config.model_path, self.config.revision
        return path if revision is None else str(local_folder(path, revision))

    def decoder(self, prompts_P: Sequence[Prompt], num_rows: int) -> Decoder:
        from rl.policies.attention import PackedDecoder

        return PackedDecoder(
            self.module, self.collate([(prompt, ()) for prompt in prompts_P]), num_rows
        )

    @contextmanager
    def base_model(self) -> Iterator[None]:
        """LoRA: within this context the adapter is off. Full fine-tuning: as `reference`."""
        adapted = self.module.adapted
        with self.module.model.disable_adapter() if adapted else self.reference():
            yield

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Within this context the module computes as it did before training.

        LoRA: the adapter is off, or has the weights that the run started from. Full fine-tuning:
        the initial checkpoint's weights, kept on the CPU from the first use on, replace the trained
        ones (not under ZeRO-3, which shards them). Under ZeRO-3 an adapter is gathered,
        overwritten, and restored at the end.
        """
        if self.module.adapted and self._start is None:
            with self.base_model():
                yield
            return
        trained = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        if is_sharded(self.module):
            assert self._start is not None, "rl check refuses full fine-tuning"
            start = {name: self._start[name.removeprefix(WRAPPER)] for name in trained}
            now = _written(trained, start)
            try:
                yield
            finally:
                _written(trained, now)
            return
        before = self._base if self._start is None else self._start
        trained_data = {name: parameter.data for name, parameter in trained.items()}
        try:
            for name, parameter in trained.items():
                weight = before[name.removeprefix(WRAPPER)]
                parameter.data = weight.to(parameter, non_blocking=True)
            yield
        finally:
            for name, parameter in trained.items():
                parameter.data = trained_data[name]

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
        exported = self._as_exported(tensors)
        return PolicyWeights(
            kind="lora" if self.module.adapted else "full",
            tensors=exported,
            lora_config=self._lora_config() if self.module.adapted else None,
            version=version,
            fingerprint=fingerprint(exported),
        )

    def save_pretrained(self, folder: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """LoRA: a PEFT adapter. Full: a transformers folder with tokenizer and processor."""
        exported = self._as_exported(tensors)
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        if self.module.adapted:
            # Makes no collective calls, unlike transformers' own `save_pretrained`.
            config = {**self._lora_config(), "inference_mode": True}
            text = json.dumps(config, indent=2, sort_keys=True) + "\n"
            (path / ADAPTER_CONFIG).write_text(text)
            _write_safetensors(path / "adapter_model.safetensors", exported)
            return
        self.module.base_model.config.to_json_file(path / "config.json")
        self.save_prompt_files(self.config, path)
        _write_safetensors(path / "model.safetensors", {**self._base, **exported})

    def _as_exported(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Tensors under the names that engines and checkpoints use."""
        if self.module.adapted:
            # `model.base_model...lora_A.default.weight`: PEFT's own names lack `.default`.
            return {
                name.removeprefix(WRAPPER).replace(".default.", "."): tensor.detach().clone()
                for name, tensor in tensors.items()
            }
        import torch

        dtype = getattr(torch, self.config.dtype)
        exported = {
            name.removeprefix(WRAPPER): tensor.detach().to(dtype)
            for name, tensor in tensors.items()
        }
        if self.module.base_model.config.tie_word_embeddings:
            # An engine has a separate head even if the weights are tied.
            exported["lm_head.weight"] = exported[self.embedding]
        return exported

    def _lora_config(self) -> dict[str, Any]:
        """PEFT's config as JSON values (sets become sorted lists), with the adapter's base."""
        peft_config = self.module.model.peft_config["default"].to_dict()
        config = {k: sorted(v) if isinstance(v, set) else v for k, v in peft_config.items()}
        return {**config, **noted(self.base(self.config), type(self.module.base_model).__name__)}


def _write_safetensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes clones, because safetensors refuses tensors that share memory (tied weights)."""
    from safetensors.torch import save_file

    copies = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    save_file(copies, path, metadata={"format": "pt"})


def _written(
    sharded: Mapping[str, Any], values: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Write `values` into parameters that ZeRO-3 shards; returns the whole values before. The
    methods are those that DeepSpeed gives its parameters. Collective."""
    parameters = list(sharded.values())
    parameters[0].all_gather(param_list=parameters)
    before = {name: parameter.data.clone() for name, parameter in sharded.items()}
    for name, parameter in sharded.items():
        parameter.data.copy_(values[name])
    parameters[0].partition(param_list=parameters, has_been_updated=True)
    return before
