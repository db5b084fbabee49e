"""Reads edits whose pictures are token codes: a `tokenized_datalist.json` and a file per edit."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from rl.api.data import DataSource, Findings, RowRules
from rl.api.plugin import FileConfig
from rl.api.types import Sample, UnusableSampleError
from rl.config.loading import not_a_file
from rl.data.rows import MAX_SHOWN, BadRowError, shorten
from rl.printing import excerpt, without_lone_surrogates
from rl.progress import counted

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


# ---- emu3 tokens ---------------------------------------------------------------------------------

NUM_CHECKED = 64
"""A config check verifies that the files of this many first entries exist."""

_SPLIT = re.compile(r"(train|training|validation|val|test|dev)(_|$)")


class Config(FileConfig):
    """One list of tokenised edits."""

    path: str
    """The list; a relative path starts at the working directory. Its files are searched under
    the list's `prefix` (relative to the working directory, then to the list's folder), then in the
    parent of the list's folder, then in `feature/` in that parent."""
    category: str = ""
    """Label of these samples for per-category metrics; '' = the data set folder's name."""


@dataclass(frozen=True)
class EditList:
    """The content of a `tokenized_datalist.json`."""

    file: Path
    entries: Sequence[str]
    prefix: str | None

    @cached_property
    def folder(self) -> Path:
        """The folder of the entries. Raises BadRowError if none of the first files exists."""
        above = self.file.parent.parent
        stated = [] if self.prefix is None else [Path(self.prefix), self.file.parent / self.prefix]
        candidates = list(dict.fromkeys([*stated, above, above / "feature"]))
        for candidate in candidates:
            if any(not not_a_file(candidate / entry) for entry in self.entries[:NUM_CHECKED]):
                return candidate
        raise BadRowError(
            f"{self.file}: its files are not found, e.g. {self.entries[0]!r:.60}; looked in "
            + ", ".join(map(str, candidates))
            + ". Put them into one of these folders, or fix the list's 'prefix'"
        )

    def missing(self, entries: Sequence[str]) -> Iterator[tuple[int, str]]:
        """(number, error message) of each of `entries` whose file does not exist."""

        @cache  # one listing per folder: a stat per file takes minutes
        def names_in(folder: Path) -> frozenset[str]:
            try:
                return frozenset(file.name for file in os.scandir(folder))
            except (OSError, ValueError):  # not a folder, or not a valid name
                return frozenset()

        for number, entry in enumerate(entries):
            file = self.folder / entry
            if file.name not in names_in(file.parent):
                file_name = excerpt(str(file), MAX_SHOWN)
                yield number, f"{self.file}, entry {number}: {file_name} does not exist"


class TokenisedEdits(DataSource[Config]):
    """The edits of a list; each file is read when its sample is fetched."""

    def __init__(self, config: Config, rules: RowRules) -> None:
        """Raises BadRowError (a ValueError) naming list and entries."""
        edits = read_list(config.path)
        # Category and label are the names of the folders above `[feature/]list/`.
        folders = edits.file.resolve().parent.parts
        folder_names = [name for name in folders if name not in ("list", "feature")]
        dataset, split = ["", *folder_names][-2:]
        self._category = config.category or (dataset if _SPLIT.match(split) else split)
        self._label = f"{dataset}/{split}"
        files = [edits.folder / entry for entry in edits.entries]
        entries_hash = hashlib.sha256(json.dumps(edits.entries).encode()).hexdigest()
        version = f"{config!r} {entries_hash}"
        self._left_out: Sequence[str] = ()
        bad = rules.checked.get(version)
        if bad is None:
            bad = self._check(edits, files, rules)
        self.num_skipped = len(bad)
        left_out = set(bad)
        self._files = [file for number, file in enumerate(files) if number not in left_out]
        unread = [f"{len(files)} files beside the list; a start reads them"]
        self.findings = Findings(
            self._left_out,
            unread=() if rules.opens is None else unread,
            checked={version: list(bad)},
        )

    def _check(self, edits: EditList, files: Sequence[Path], rules: RowRules) -> Sequence[int]:
        """Numbers of the bad entries, under 'skip'. For `rl check`, only the first files are looked
        up; else all are read."""
        bad = dict(edits.missing(edits.entries[: rules.opens and NUM_CHECKED]))
        if rules.opens is None:
            with counted(f"edits of {self._label}", len(files)) as progress:
                for number, file in enumerate(files):
                    progress.at(number)
                    try:
                        if number not in bad:
                            sample = self._read(file)
                            if rules.check is not None:
                                rules.check(sample.id, sample.instruction, (), sample.source_codes)
                    except UnusableSampleError as error:
                        bad[number] = f"{file}: {str(error).removeprefix(f'{file}: ')}"
        if bad and rules.on_bad_row == "error":
            raise BadRowError(
                "\n".join(shorten(list(bad.values()), len(bad))) + "\nMend these files, or leave "
                "their entries out with data.on_bad_row: 'skip'."
            )
        self._left_out = shorten(list(bad.values()), len(bad))
        return sorted(bad)

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> Sample:
        return self._read(self._files[index])

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


def read_list(path: str | Path) -> EditList:
    """The list at `path`. Raises BadRowError if it does not exist or is not a list of edits.

    EARL's set-up creates a broken link to `<set>/list` in `<set>/feature/`; a path through that
    link is resolved to `<set>/list`.
    """
    file = Path(path)
    if not_a_file(file) and file.parent.parent.name == "feature":
        file = file.parent.parent.parent / file.parent.name / file.name
    if file.is_dir():
        raise BadRowError(f"{path} is a folder; name the tokenized_datalist.json in it")
    if why := not_a_file(file):
        raise BadRowError(
            f"{excerpt(str(path), MAX_SHOWN)} {why} (from {Path.cwd()}); fetch the published sets "
            "with scripts/setup_datasets.sh, or tokenise your own with rl prepare"
        )
    try:
        content = json.loads(file.read_bytes().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise BadRowError(f"{file}: is not JSON ({error})") from error
    except OSError as error:
        raise BadRowError(f"{file} cannot be read ({error.strerror})") from error
    entries = content.get("path_list") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise BadRowError(f'{file}: is not a list {{"prefix": ..., "path_list": ["1.pth", ...]}}')
    if not entries:
        raise BadRowError(f"{file}: its path_list is empty")
    prefix = content.get("prefix")
    return EditList(file, entries, prefix if isinstance(prefix, str) else None)
