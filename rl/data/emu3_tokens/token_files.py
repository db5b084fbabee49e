"""Reads and writes one tokenised edit; the pickle of a published `.pth` is never run."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rl.config.loading import not_a_file
from rl.printing import without_lone_surrogates

SUFFIX = ".safetensors"


class UnreadableError(ValueError):
    """A file is not a tokenised edit; the message does not repeat its path."""


@dataclass(frozen=True, eq=False)
class TokenisedEdit:
    """An edit whose pictures are stored as Emu3 codes."""

    id: str
    """Unique within its data set."""
    instruction: str
    source_codes: np.ndarray
    """[h, w] int32, codebook indices from 0."""
    target_codes: np.ndarray
    """[h, w] int32."""
    thoughts: Mapping[str, str] = field(default_factory=dict)
    """Name -> written reasoning; for supervised training, never shown to a policy here."""


def read(path: Path) -> TokenisedEdit:
    """The edit in a file. Raises UnreadableError; a hostile file may raise any other error."""
    if why := not_a_file(path):
        raise UnreadableError(why)
    fields = _read_safetensors(path) if path.suffix == SUFFIX else _read_pth(path)
    instruction = fields.get("instruction")
    if not isinstance(instruction, str) or not instruction.strip():
        raise UnreadableError(f"its instruction is {instruction!r:.60}, not text")
    identity = str(fields.get("edit_id") or path.stem).removesuffix(".pth")
    if (identity + instruction) != without_lone_surrogates(identity + instruction):
        raise UnreadableError("its text holds half a character (a lone surrogate)")
    thoughts = fields.get("CoT") or {}
    return TokenisedEdit(
        id=identity,
        instruction=instruction.strip(),
        source_codes=_codes(fields, "original_image"),
        target_codes=_codes(fields, "edited_image"),
        thoughts=thoughts if isinstance(thoughts, Mapping) else {"thought": str(thoughts)},
    )


def write(path: Path, edit: TokenisedEdit) -> None:
    """Replace `path` atomically; several processes may write the same edit at once. Equal edits
    give equal bytes."""
    from safetensors.numpy import save_file

    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    text = {"edit_id": edit.id, "instruction": edit.instruction, "CoT": dict(edit.thoughts)}
    codes = {"original_image": edit.source_codes, "edited_image": edit.target_codes}
    save_file(
        {name: np.ascontiguousarray(array, np.int32) for name, array in codes.items()},
        temporary,
        metadata={"edit": json.dumps(text, ensure_ascii=False)},
    )
    temporary.replace(path)


def _read_safetensors(path: Path) -> dict[str, Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as stored:
            text = json.loads((stored.metadata() or {})["edit"])
            return {**text, **{name: stored.get_tensor(name) for name in stored.keys()}}  # noqa: SIM118
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UnreadableError(f"is not a tokenised edit in safetensors format ({error})") from error


def _read_pth(path: Path) -> dict[str, Any]:
    """Loads a `torch.save` of a dict; the unpickler constructs nothing but arrays and text."""
    import torch

    try:
        with torch.serialization.safe_globals(_array_globals()):
            fields = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # Damaged and hostile files raise many types (UnpicklingError, RuntimeError, EOFError,
        # TypeError, ...); the user gets the same message for all.
        match = re.search(r"GLOBAL ([\w.]+)", str(error))
        reason = f"it asks for {match[1]}" if match else f"{type(error).__name__}"
        raise UnreadableError(
            f"is refused ({reason}): only arrays of whole numbers and text are loaded, nothing is "
            "run; if it is one of the published files, fetch it again"
        ) from error
    if not isinstance(fields, dict):
        raise UnreadableError(f"holds a {type(fields).__name__}, not the fields of an edit")
    return fields


def _array_globals() -> list[Any]:
    """The globals of a pickled numpy array, under numpy 1's and numpy 2's module names."""
    from numpy._core.multiarray import _reconstruct

    modules = ("numpy.core.multiarray", "numpy._core.multiarray")
    integers = [np.dtype(code) for code in ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")]
    return [
        *((_reconstruct, f"{module}._reconstruct") for module in modules),
        np.ndarray,
        np.dtype,
        *dict.fromkeys(type(integer) for integer in integers),
    ]


def _codes(fields: Mapping[str, Any], key: str) -> np.ndarray:
    if key not in fields:
        raise UnreadableError(f"has no {key!r}; it has {', '.join(map(str, fields)) or 'nothing'}")
    codes = np.asarray(fields[key])
    if codes.ndim != 2 or not codes.size or codes.dtype.kind not in "iu":
        raise UnreadableError(
            f"{key!r} is {codes.dtype} of shape {list(codes.shape)}, not whole numbers [h, w]"
        )
    if codes.min() < 0 or codes.max() > np.iinfo(np.int32).max:
        raise UnreadableError(f"{key!r} runs from {codes.min()} to {codes.max()}; codes are >= 0")
    return codes.astype(np.int32)
