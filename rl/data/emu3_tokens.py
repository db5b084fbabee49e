"""Reads edits whose pictures are token codes: a `tokenized_datalist.json` and a file per edit."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from rl.api.data import RowRules
from rl.api.plugin import FileConfig
from rl.api.types import Sample
from rl.config.loading import not_a_file
from rl.data.rows import MAX_SHOWN, BadRowError, CheckedSource, UnusableError
from rl.files import write_atomically
from rl.printing import excerpt, without_lone_surrogates

SUFFIX = ".safetensors"


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
    """The edit in a file. Raises UnusableError, without the file's name; a hostile file may raise
    any other error."""
    if why := not_a_file(path):
        raise UnusableError(why)
    fields = _read_safetensors(path) if path.suffix == SUFFIX else _read_pth(path)
    instruction = fields.get("instruction")
    if not isinstance(instruction, str) or not instruction.strip():
        raise UnusableError(f"its instruction is {instruction!r:.60}, not text")
    identity = str(fields.get("edit_id") or path.stem).removesuffix(".pth")
    if (identity + instruction) != without_lone_surrogates(identity + instruction):
        raise UnusableError("its text holds half a character (a lone surrogate)")
    thoughts = fields.get("CoT") or {}
    return TokenisedEdit(
        id=identity,
        instruction=instruction.strip(),
        source_codes=_codes(fields, "original_image"),
        target_codes=_codes(fields, "edited_image"),
        thoughts=thoughts if isinstance(thoughts, Mapping) else {"thought": str(thoughts)},
    )


def write(path: Path, edit: TokenisedEdit) -> None:
    """Replace `path` atomically. Equal edits give equal bytes."""
    from safetensors.numpy import save

    text = {"edit_id": edit.id, "instruction": edit.instruction, "CoT": dict(edit.thoughts)}
    codes = {"original_image": edit.source_codes, "edited_image": edit.target_codes}
    arrays = {name: np.ascontiguousarray(array, np.int32) for name, array in codes.items()}
    content = save(arrays, metadata={"edit": json.dumps(text, ensure_ascii=False)})
    write_atomically(path, content, durable=False)


def _read_safetensors(path: Path) -> dict[str, Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as stored:
            text = json.loads((stored.metadata() or {})["edit"])
            return {**text, **{name: stored.get_tensor(name) for name in stored.keys()}}  # noqa: SIM118
    except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UnusableError(f"is not a tokenised edit in safetensors format ({error})") from error


def _read_pth(path: Path) -> dict[str, Any]:
    """Loads a `torch.save` of a dict; the unpickler constructs nothing but arrays and text."""
    import torch

    try:
        with torch.serialization.safe_globals(_array_globals()):
            fields = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # Damaged and hostile files raise many types (UnpicklingError, RuntimeError, EOFError,
        # TypeError, ...); the user gets the same message for all.
        raise UnusableError(
            f"is refused ({type(error).__name__}): only arrays of whole numbers and text are "
            "loaded, nothing is run; if it is one of the published files, fetch it again"
        ) from error
    if not isinstance(fields, dict):
        raise UnusableError(f"holds a {type(fields).__name__}, not the fields of an edit")
    return fields


def _array_globals() -> list[Any]:
    """The globals of a pickled numpy array, under numpy 1's and numpy 2's module names."""
    from numpy._core.multiarray import _reconstruct

    modules = ("numpy.core.multiarray", "numpy._core.multiarray")
    integers = ("i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8")
    return [
        *((_reconstruct, f"{module}._reconstruct") for module in modules),
        np.ndarray,
        np.dtype,
        *(type(np.dtype(code)) for code in integers),
    ]


def _codes(fields: Mapping[str, Any], key: str) -> np.ndarray:
    if key not in fields:
        raise UnusableError(f"has no {key!r}; it has {', '.join(map(str, fields)) or 'nothing'}")
    codes = np.asarray(fields[key])
    is_table = codes.ndim == 2 and codes.size > 0 and codes.dtype.kind in "iu"
    if not is_table or codes.min() < 0 or codes.max() >= 2**31:
        raise UnusableError(
            f"{key!r} is {codes.dtype} of shape {list(codes.shape)}, not codes >= 0 [h, w]"
        )
    return codes.astype(np.int32)


# ---- emu3 tokens ---------------------------------------------------------------------------------

NUM_CHECKED = 64
"""`rl check` verifies that the files of this many first entries exist."""

_SPLIT = re.compile(r"(train|training|validation|val|test|dev)(_|$)")


class Config(FileConfig):
    """One list of tokenised edits."""

    path: str
    """The list; a relative path starts at the working directory. Its files are searched under
    the list's `prefix` (relative to the working directory, then to the list's folder), then in the
    parent of the list's folder, then in `feature/` in that parent."""
    category: str = ""
    """Label of these samples for per-category metrics; '' = the data set folder's name."""


class TokenisedEdits(CheckedSource[Config]):
    """Edits whose pictures are Emu3 codes: a list as `rl prepare tokenize` writes it, and a file of
    each edit, which is read when its sample is fetched."""

    def __init__(self, config: Config, rules: RowRules) -> None:
        """Raises BadRowError (a ValueError) naming list and entries."""
        super().__init__(config, rules)
        self._list, self._files = read_list(config.path)
        # Category and label are the names of the folders above `[feature/]list/`.
        folders = self._list.resolve().parent.parts
        folder_names = [name for name in folders if name not in ("list", "feature")]
        dataset, split = ["", *folder_names][-2:]
        self._category = config.category or (dataset if _SPLIT.match(split) else split)
        self._label = f"{dataset}/{split}"
        files_hash = hashlib.sha256("\n".join(map(repr, self._files)).encode()).hexdigest()
        version, num = f"{config!r} {files_hash}", len(self._files)
        self._check_all(version, f"edits of {self._label}", num, rules.opens and NUM_CHECKED)
        if rules.opens is not None:
            unread = [f"{num} files beside the list; a start reads them"]
            self.findings = replace(self.findings, unread=unread)

    def _check_row(self, index: int) -> None:
        """Reads the file, or for `rl check` only looks whether it exists."""
        file = self._files[index]
        if self._rules.opens is None:
            sample = self._read(file)
            self._rules.check(sample.id, sample.instruction, (), sample.source_codes)
        elif why := not_a_file(file):
            raise BadRowError(f"{file}: {why}")

    def _place(self, index: int) -> str:
        return f"{self._list}, entry {index}"

    def __getitem__(self, index: int) -> Sample:
        return self._read(self._files[self._kept[index]])

    def _read(self, file: Path) -> Sample:
        try:
            edit = read(file)
        except Exception as error:  # a file may hold anything and raise any error
            raise BadRowError(f"{file}: {excerpt(str(error), MAX_SHOWN)}") from error
        return Sample(
            id=f"{self._label}/{edit.id}",
            instruction=edit.instruction,
            source_codes=edit.source_codes,
            target_codes=edit.target_codes,
            category=self._category,
        )

    @classmethod
    def provides(cls, config: Config) -> frozenset[str]:
        """'source' and 'target' are pictures once the renderer has decoded the codes."""
        return frozenset({"source_codes", "target_codes", "source", "target"})


def read_list(path: str | Path) -> tuple[Path, list[Path]]:
    """(the list at `path`, the files of its edits). Raises BadRowError if it does not exist, is not
    a list of edits, or if none of its first files exists.

    EARL's set-up creates a broken link to `<set>/list` in `<set>/feature/`; a path through that
    link is resolved to `<set>/list`.
    """
    file = Path(path)
    if not_a_file(file) and file.parent.parent.name == "feature":
        file = file.parent.parent.parent / file.parent.name / file.name
    if why := not_a_file(file):
        raise BadRowError(
            f"{excerpt(str(path), MAX_SHOWN)} {why} (from {Path.cwd()}); fetch the published sets "
            "with scripts/setup_datasets.sh, or tokenise your own with rl prepare"
        )
    try:
        content = json.loads(file.read_bytes().decode("utf-8-sig"))
    except (ValueError, RecursionError, OSError) as error:
        raise BadRowError(f"{file}: is not JSON ({error})") from error
    entries = content.get("path_list") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise BadRowError(f'{file}: is not a list {{"prefix": ..., "path_list": ["1.pth", ...]}}')
    if not entries:
        raise BadRowError(f"{file}: its path_list is empty")
    above, prefix = file.parent.parent, content.get("prefix")
    stated = [Path(prefix), file.parent / prefix] if isinstance(prefix, str) else []
    folders = list(dict.fromkeys([*stated, above, above / "feature"]))
    for folder in folders:
        if any(not not_a_file(folder / entry) for entry in entries[:NUM_CHECKED]):
            return file, [folder / entry for entry in entries]
    raise BadRowError(
        f"{file}: its files are not found, e.g. {entries[0]!r:.60}; looked in "
        f"{', '.join(map(str, folders))}. Put them into one of these folders, or fix the list's "
        "'prefix'"
    )
