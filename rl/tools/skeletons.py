"""What a rehearsal needs before torch is imported: the CUDA guard, and models without weights."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl.check.memory_plan import MODELS
from rl.config.loading import located
from rl.model_files import cached

WEIGHTS = ("*.safetensors", "*.bin", "*.pt")

Json = Mapping[str, Any]


def model_folder(path: str, revision: str | None, work: Path) -> str:
    """The folder, or cached hub id, with a model's config files and tokenizer. Raises ValueError
    for a hub id that is neither cached nor known."""
    if not path or Path(path).is_dir():
        return path
    if cached(path, "config.json", revision) or cached(path, "model_index.json", revision):
        return path
    if path not in MODELS["models"]:
        raise ValueError(
            f"the sizes of {path!r} are not known: fetch its config files first (hf download "
            f"{path} --exclude '*.safetensors'), or give a local model folder"
        )
    target = work / path.replace("/", "--")
    if not target.is_dir():
        _write(MODELS["models"][path], target)
    return str(target)


def _write(model: Json, target: Path) -> None:
    model = MODELS["models"][model["same_as"]] if "same_as" in model else model
    _copy(model["like"], target)
    for folder, tiny in model.get("folders", {}).items():
        _copy(tiny, target / folder)
    for name, sizes in model["files"].items():
        file = target / name
        file.parent.mkdir(exist_ok=True)
        if isinstance(sizes, str):  # the text encoder has that policy's config
            sizes = MODELS["models"][sizes]["files"]["config.json"]
        # A config that names its class is complete: the class's defaults are the missing values.
        is_complete = "_class_name" in sizes or "model_type" in sizes
        tiny = {} if is_complete else json.loads(file.read_text())
        file.write_text(json.dumps(_merged(tiny, sizes), indent=1))
    if (target / "text_encoder_3").is_dir():
        from transformers import T5TokenizerFast

        # One token per word: prompts are padded to one length anyway.
        pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -1.0), ("a", -2.0)]
        T5TokenizerFast(vocab=pieces, extra_ids=0).save_pretrained(target / "tokenizer_3")
    if model["like"] == "emu3":
        _fill_emu3_tokenizer(target / "tokenizer.json")


def _copy(tiny: str, target: Path) -> None:
    """Copy all files of a tiny model except its weights."""
    source = located(f"{MODELS['tokenizers']}/{tiny}")
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(*WEIGHTS), dirs_exist_ok=True)


def _merged(old: Json, new: Json) -> dict[str, Any]:
    merged = dict(old)
    for key, value in new.items():
        is_nested = key.endswith("_config") and isinstance(merged.get(key), Mapping)
        merged[key] = _merged(merged[key], value) if is_nested else value
    return merged


def _fill_emu3_tokenizer(file: Path) -> None:
    """Give the tokenizer as many ids as the released one has: filler tokens that no text contains,
    then the special tokens, then all visual tokens."""
    tokenizer = json.loads(file.read_text())
    vocab = tokenizer["model"]["vocab"]
    specials = [token for token in tokenizer["added_tokens"] if "visual" not in token["content"]]
    first_special = MODELS["emu3_text_tokens"] - len(specials)
    for number in range(len(vocab), first_special):
        vocab[f"<filler {number}>"] = number
    names = [token["content"] for token in specials]
    names += [f"<|visual token {code:06d}|>" for code in range(MODELS["emu3_codes"])]
    tokenizer["added_tokens"] = [
        {**specials[0], "id": first_special + place, "content": name}
        for place, name in enumerate(names)
    ]
    file.write_text(json.dumps(tokenizer))


# ---- cuda guard ----------------------------------------------------------------------------------
# Compiles and loads `cuda_guard.cpp`, a CUDA device that computes nothing, before torch starts.


class CannotRehearseError(Exception):
    """What this machine lacks for a rehearsal, and the fix."""


def load() -> None:
    """Call it before the first `import torch`: autograd looks the hooks up once.

    Raises CannotRehearseError without a C++ compiler, and on a CUDA build of PyTorch, which has a
    device guard of its own.
    """
    assert "torch" not in sys.modules, "torch was imported before the fake GPU was loaded"
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None, "PyTorch is not installed"
    root = Path(spec.origin).parent
    if (root / "lib" / "libtorch_cuda.so").exists():
        raise CannotRehearseError(
            "a rehearsal needs the CPU build of PyTorch, and this is the CUDA build: install "
            "requirements-cpu.lock in a clone of its own (REQUIREMENTS=requirements-cpu.lock)"
        )
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise CannotRehearseError(
            "a rehearsal compiles 35 lines of C++, and there is no g++: apt install g++"
        )
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as folder:
        library = Path(folder, "cuda_guard.so")
        includes = [f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}"]
        source = str(Path(__file__).with_name("cuda_guard.cpp"))
        command = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", *includes, source]
        command += ["-o", str(library), f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu"]
        built = subprocess.run(command, capture_output=True, text=True)
        if built.returncode:
            raise CannotRehearseError(f"{compiler} could not compile {source}:\n{built.stderr}")
        for file in (root / "lib/libc10.so", root / "lib/libtorch_cpu.so", library):
            ctypes.CDLL(str(file), ctypes.RTLD_GLOBAL)
