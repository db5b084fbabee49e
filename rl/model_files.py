"""Folders of models: what they hold, whether it is the wanted model, and weights."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl.api.plugin import ModelFiles
from rl.config import loading
from rl.config.loading import MISSING, escaped, is_folder, not_a_file
from rl.files import read_object

if TYPE_CHECKING:
    import torch

# ---- weights -------------------------------------------------------------------------------------
# Counts and checks weights by their file headers, aligns them in memory, and checksums them.

ALIGNMENT_BYTES = 64
"""Alignment of the memory that PyTorch allocates on the CPU."""
CHUNK = 2**20
"""64-bit numbers that `bit_sums` adds at once."""
CHUNK_WEIGHT = 0x2545F4914F6CDD1D
"""Odd factor between the weights of successive chunks."""
LFS_POINTER = b"version https://git-lfs"


def num_parameters(
    folder: str | Path, is_counted: Callable[[str], bool] = lambda name: True
) -> float:
    """Number of parameters of a folder's safetensors tensors whose name `is_counted` accepts;
    without variants (`model.fp16.safetensors`), which are the same again."""
    files = Path(folder).glob("*.safetensors")
    headers = (_header(file) for file in files if "." not in file.stem)
    return float(
        sum(math.prod(t["shape"]) for h in headers for name, t in h.items() if is_counted(name))
    )


class NotFiniteError(ValueError):
    """Weights contain NaN or infinity."""


def require_finite(weights: Iterable[tuple[str, torch.Tensor]], owner: str) -> None:
    """Raise NotFiniteError naming `owner` and its first weight with NaN or infinity. Skips 8-bit
    weights, which come with separate scales."""
    for name, weight in weights:
        if weight.is_floating_point() and weight.element_size() > 1 and not weight.is_meta:
            are_numbers = weight.detach().isfinite()
            if not are_numbers.all():
                num_bad = weight.numel() - int(are_numbers.sum())
                raise NotFiniteError(
                    f"{owner} holds NaN or infinity: {num_bad} of the {weight.numel()} numbers of "
                    f"{name}; copy or download it again, or name another"
                )


def align_weights(module: torch.nn.Module, device: str) -> None:
    """On the CPU, copy weights to addresses aligned as PyTorch's allocator does. Loaded weights are
    memory-mapped from their file, and some MKL kernels (one row in float32, on AMD or with SSE4.2)
    sum in another order at addresses that are not multiples of 16 bytes. It also raises
    NotFiniteError for NaN and infinity, because every loaded model passes through it."""
    require_finite(module.named_parameters(), type(module).__name__)
    if device != "cpu":
        return
    for tensor in [*module.parameters(), *module.buffers()]:
        if tensor.data_ptr() % ALIGNMENT_BYTES:
            tensor.data = tensor.data.clone()


@contextmanager
def evaluating(module: torch.nn.Module) -> Iterator[None]:
    """Within the context, the module is in evaluation mode."""
    was_training = module.training
    module.eval()
    try:
        yield
    finally:
        module.train(was_training)


def bit_sums(tensor: torch.Tensor) -> torch.Tensor:
    """[1] int64 checksum on the tensor's device: the sum of its bytes, as 64-bit numbers, each
    times an odd weight. A changed bit and swapped values or rows change it. No temporary is as
    large as the tensor, unless its bytes have to be padded."""
    import torch

    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if flat.storage_offset() % 8 or flat.numel() % 8:
        flat = torch.nn.functional.pad(flat, (0, -flat.numel() % 8)).clone()
    weights = _weights(flat.device)
    total = torch.zeros(1, dtype=torch.int64, device=flat.device)
    for chunk in flat.view(torch.int64).split(CHUNK):
        total = total * CHUNK_WEIGHT + (chunk * weights[: len(chunk)]).sum()
    return total


@lru_cache
def _weights(device: torch.device) -> torch.Tensor:
    """[CHUNK] int64 odd pseudorandom weights: splitmix64 of 1 .. n (Steele et al. 2014, "Fast
    splittable pseudorandom number generators"), with signed shifts."""
    import torch

    mixed = torch.arange(1, CHUNK + 1, device=device)
    mixed = (mixed ^ (mixed >> 30)) * -0x40A7B892E31B1A47
    mixed = (mixed ^ (mixed >> 27)) * -0x6B2FB644ECCEEE15
    return (mixed ^ (mixed >> 31)) | 1


def weights_problem(file: Path) -> str:
    """The problem of a weights file, or ''. In formats other than safetensors, only empty files and
    Git LFS pointers are detected."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(len(LFS_POINTER))
    if start == LFS_POINTER:
        return f"{file} is a pointer of Git LFS, not the weights; fetch them (git lfs pull)"
    if file.suffix != ".safetensors":
        return "" if size else f"{file} is empty; copy or download it again"
    try:
        ends = [tensor["data_offsets"][1] for tensor in _header(file).values()]
        expected: Any = 8 + int.from_bytes(start[:8], "little") + max(ends, default=0)
    except (ValueError, RecursionError, AttributeError, LookupError, TypeError):
        expected = "another number, and cannot be read"
    if size == expected:
        return ""
    return (
        f"{file} is damaged ({size} bytes; its header says {expected}); copy or download it again"
    )


def _header(file: Path) -> dict[str, dict[str, Any]]:
    """The tensors in a safetensors header, read without the package, which `rl check` may lack.
    Raises ValueError if it claims to exceed the file."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > file.stat().st_size:
            raise ValueError(f"{file}: a header of {length} bytes")
        header = json.loads(stream.read(length))
    return {name: tensor for name, tensor in header.items() if name != "__metadata__"}


def fingerprint(tensors: Mapping[str, torch.Tensor]) -> str:
    """blake2b over names, dtypes, shapes and `bit_sums`, in name order; only the sums come to the
    host."""
    import torch

    names = sorted(tensors)
    digest = hashlib.blake2b(digest_size=16)
    for name in names:
        digest.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}".encode())
    if names:
        sums = torch.cat([bit_sums(tensors[name]) for name in names])
        digest.update(sums.cpu().numpy().tobytes())
    return digest.hexdigest()


# ---- model files ---------------------------------------------------------------------------------
# Checks from names, sizes and headers that a model's files exist, are whole and of its kind.

MAX_SHOWN = 200
CARD_LINE = r"""^(license|license_name):[ \t]*["']?([\w.+-][\w.+ -]*?)["']?[ \t]*$"""
"""A line of a card's front matter that names the licence: (key, value)."""
HUB_ID = r"(?!.*(--|\.\.|\.git$))(?=.{1,96}$)(\w([\w.-]*\w)?/)?\w([\w.-]*\w)?"
"""The owner may be missing: the hub's oldest models have none."""
KIND_KEYS = ("model_type", "_class_name")
"""Keys that name the kind of model in a config file: transformers', diffusers'."""


def model_problems(models: Iterable[ModelFiles]) -> Iterator[str]:
    """Problems that prevent loading `models`, as 'key: problem, remedy'. If a folder holds another
    model, only that problem is reported."""
    parts_of_model = defaultdict(list)
    for model in models:
        parts_of_model[model.key, model.path].append(model)
    for (key, path), parts in parts_of_model.items():
        if missing := missing_model(key, path):
            yield from missing
            continue
        try:
            problems = list(_wrong_kinds(parts)) or list(_folder_problems(parts))
        except OSError as error:
            problems = [f"{error.filename} cannot be read ({error.strerror})"]
        yield from (f"{key}: {problem}" for problem in problems)


def missing_model(key: str, path: str) -> list[str]:
    """The problem of a model's path; [] if it is an existing folder or looks like a hub id."""
    if (path and is_folder(path)) or ("/" in path and is_hub_id(path)):
        return []
    path_text = escaped(repr(path), MAX_SHOWN)
    return [f"{key}: no folder {path_text} (from {Path.cwd()}), and not a hub id 'owner/name'"]


def cached(repo_id: str, name: str, revision: str | None = None) -> Path | None:
    """A hub repository's file in the local cache; None if it is not cached."""
    try:
        from huggingface_hub import constants
    except ImportError:
        return None
    folder = Path(constants.HF_HUB_CACHE, "models--" + repo_id.replace("/", "--"))
    if not (is_hub_id(repo_id) and folder.is_dir()):
        return None  # checked without the slow import below
    from huggingface_hub import try_to_load_from_cache

    cached_path = try_to_load_from_cache(repo_id, name, revision=revision)
    return Path(cached_path) if isinstance(cached_path, str) else None


def file_here(path: str, name: str, revision: str | None = None) -> Path | None:
    """A model's file in its folder or in the hub's cache; None if it is in neither."""
    file = Path(path, name)
    return file if file.is_file() else cached(path, name, revision)


def _wrong_kinds(parts: Iterable[ModelFiles]) -> Iterator[str]:
    for part in parts:
        file = file_here(part.path, os.path.join(part.subfolder, part.config), part.revision)
        if file and (problem := _wrong_kind(part, read_object(file), f"{part.path} ({file})")):
            yield problem
            return


def _folder_problems(parts: Iterable[ModelFiles]) -> Iterator[str]:
    """Missing and damaged files; of a hub id none, because they are downloaded later."""
    lacking: list[str] = []
    damaged: list[str] = []
    for part in (part for part in parts if is_folder(part.path)):
        folder = Path(part.path, part.subfolder)
        weights = _weights_files(part, folder)
        config = [(part.config,)] if part.config_required else []
        for names in (*config, *part.files, *weights):
            if not any((folder / name).is_file() for name in names):
                lacking.append(" or ".join(os.path.join(part.subfolder, name) for name in names))
        shards = (folder / names[0] for names in weights)
        damaged += filter(None, (weights_problem(shard) for shard in shards if shard.is_file()))
    if lacking:
        yield f"{part.path} lacks {', '.join(lacking)}; copy or download it again"
    yield from damaged


def _weights_files(part: ModelFiles, folder: Path) -> list[tuple[str, ...]]:
    """Names of the files with the weights, or of their index; one of each tuple must exist."""
    for name in part.weights:
        index = folder / f"{name}.index.json"
        if index.is_file() and not (folder / name).is_file():
            weight_map = (read_object(index) or {}).get("weight_map")
            if isinstance(weight_map, Mapping) and weight_map:
                return [(shard,) for shard in sorted(set(map(str, weight_map.values())))]
            return [(f"names of weights in {index.name}",)]
        if (folder / name).is_file():
            return [(name,)]
    return [(name, f"{name}.index.json") for name in part.weights[:1]]


def _wrong_kind(part: ModelFiles, config: dict[str, Any] | None, where: str) -> str:
    """Why this config file is not of a kind of model that can be loaded here, or ''."""
    if config is None:
        return f"{where} is damaged: it holds no JSON object; copy or download it again"
    key = next((key for key in KIND_KEYS if key in config), " or ".join(KIND_KEYS))
    kind, classes = str(config.get(key)), config.get("architectures")
    named = set(map(str, classes)) if isinstance(classes, list) and classes else part.classes
    for label, said, accepted in (
        (key, {kind}, part.kinds),
        ("architectures", named, part.classes),
    ):
        if accepted and not said & accepted:
            stated, needed = (" or ".join(map(repr, sorted(names))) for names in (said, accepted))
            return f"{where} says {label} {stated}, but only {needed} can be loaded here; name one"
    return ""


# ---- adapter base --------------------------------------------------------------------------------
# Writes and reads the keys of `adapter_config.json` (PEFT) that name an adapter's base model.

ADAPTER_CONFIG = "adapter_config.json"
NAME, MAPPING = "base_model_name_or_path", "auto_mapping"
"""Loaders pass the value of `NAME` to the hub as it is, so it must be a folder or a hub id."""
SUBFOLDER, WORDS, FORMAT = "base_model_subfolder", "base_model_tokenizer", "format"
"""Keys of ours in `auto_mapping`. PEFT 0.21 ignores them there; elsewhere it logs a warning."""

PLAIN: dict[str, Any] = {
    "peft_type": "LORA", "bias": "none", "modules_to_save": None, "rank_pattern": {},
    "alpha_pattern": {}, "use_rslora": False, "use_dora": False, "lora_bias": False,
    "trainable_token_indices": None, "target_parameters": None, "layer_replication": None,
}  # fmt: skip
"""A LoRA on linear layers that are all scaled by alpha / r: what policy and engine compute."""


@dataclass(frozen=True)
class Base:
    """The untrained weights under an adapter."""

    path: str
    revision: str | None = None
    subfolder: str = ""
    """Inside a hub repository; for a folder it is part of the path."""
    words: str = ""
    """Folder or hub id of tokenizer and image processor; '' = the same."""


def noted(base: Base, model_class: str) -> dict[str, Any]:
    """The keys of an adapter_config.json that name its base, a transformers `model_class`. The
    task type is None: with one, PEFT's Auto classes would load a class that reads no pictures."""
    our_keys = {SUBFOLDER: base.subfolder, WORDS: base.words, FORMAT: loading.ADAPTER_FORMAT}
    return {
        NAME: base.path,
        "revision": base.revision,
        "task_type": None,
        MAPPING: {
            "base_model_class": model_class,
            "parent_library": "transformers",
            **{key: value for key, value in our_keys.items() if value},
        },
    }


def read_config(adapter: Path) -> dict[str, Any]:
    """The adapter_config.json of a folder. Raises ValueError for a damaged or newer one, and for
    an adapter that is no plain LoRA."""
    file = adapter / ADAPTER_CONFIG
    config = read_object(file)
    if config is None:
        raise ValueError(f"{file} is damaged: it holds no JSON object")
    if config.get("megatron_config"):  # PEFT then imports the module that the file names
        raise ValueError(f"{file} names megatron_config, which is not supported; remove it")
    odd = [key for key, plain in PLAIN.items() if config.get(key) and config[key] != plain]
    if odd:
        found = ", ".join(f"{key}: {config[key]!r:.80}" for key in odd)
        raise ValueError(
            f"{file} is of no plain LoRA ({found}); merge it into its base model (PEFT's "
            "`merge_and_unload`), and start from that"
        )
    mapping = config.get(MAPPING)
    number = mapping.get(FORMAT, 1) if isinstance(mapping, Mapping) else 1
    if problem := loading.refusal(str(file), number, loading.ADAPTER_FORMAT):
        raise ValueError(problem)
    return config


def licence_of(path: str) -> tuple[str, str | None]:
    """(licence, its name if the licence is 'other') from the front matter of the README.md in a
    model's or data set's folder or in the hub's cache; ('other', 'unknown') if it states none.
    Makes no network request, and needs no package beside this one's own."""
    text = ""
    with suppress(OSError):  # there is no card, or it cannot be read
        card = file_here(path, "README.md")
        text = card.read_text("utf-8", "replace") if card else ""
    front = re.match(r"---\n(.*?\n)---", text, re.DOTALL)
    stated = dict(re.findall(CARD_LINE, front[1] if front else "", re.MULTILINE | re.ASCII))
    licence, name = stated.get("license", "other"), stated.get("license_name", "unknown")
    return licence, name if licence == "other" else None


def is_hub_id(path: str) -> bool:
    """Whether `path` is a valid id of a hub repository and no local path has this name."""
    return re.fullmatch(HUB_ID, path, re.ASCII) is not None and not_a_file(path) == MISSING
