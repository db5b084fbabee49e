"""Data sources: JSONL files, Hugging Face data sets (local or on the hub), prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from os.path import isfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import model_validator

from rl.api.plugin import FileConfig
from rl.config.loading import FOLDER, MISSING, not_a_file
from rl.config.schema import Unread
from rl.data.rows import MAX_SHOWN, BadRowError, Columns, Lines, Rows, RowsConfig, RowsSource
from rl.printing import excerpt

if TYPE_CHECKING:
    from datasets import Dataset

# ---- edit jsonl ----------------------------------------------------------------------------------
# Reads image edits from a JSONL file: a line has the pictures' paths and an instruction.


class EditJsonlConfig(RowsConfig):
    """The keys of a JSONL file of edits."""

    path: str
    """The file; a relative path starts at the working directory."""


class EditJsonl(RowsSource[EditJsonlConfig]):
    """One JSONL file of edits or questions: an object per line, with text and pictures."""

    @classmethod
    def read(cls, config: EditJsonlConfig) -> Rows:
        return _read_lines(config, config.path)


def _read_lines(config: RowsConfig, path: str) -> Rows:
    lines = Lines(Path(path))
    folder = Path(config.image_folder or Path(path).parent)
    return Rows(
        rows=lines,
        numbers=lines.numbers,
        id_numbers=lines.numbers,
        origin=path,
        version=lines.version,
        columns=config.columns,
        folder=folder,
    )


# ---- hf dataset ----------------------------------------------------------------------------------
# Reads a Hugging Face data set: a hub id, or local parquet, arrow, csv or json files.

_BUILDERS = {
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".csv": "csv",
    ".json": "json",
    ".jsonl": "json",
}


class HfDatasetConfig(RowsConfig):
    """One split of one data set."""

    path: str
    """Hub id ('owner/name'), or a local file or folder (also one written by `save_to_disk`); a
    local path wins if it exists. A relative path starts at the working directory."""
    name: Annotated[str, Unread("path", isfile)] = ""
    """The data set's configuration on the hub, '' = its only or default one."""
    revision: Annotated[str, Unread("path", isfile)] = ""
    """Branch, tag or commit on the hub, '' = the newest."""
    split: str = "train"
    """Split; slices such as 'train[:95%]' work unless `save_to_disk` wrote it; a single file is one
    split, whatever its name."""


class HfDataset(RowsSource[HfDatasetConfig]):
    """One split of a Hugging Face data set, from the hub or from local files (parquet, arrow, csv,
    json)."""

    @classmethod
    def is_here(cls, config: HfDatasetConfig) -> bool:
        is_plain = config.path.endswith(".jsonl") and "[" not in config.split
        return _is_local(config) and (is_plain or find_spec("datasets") is not None)

    @classmethod
    def read(cls, config: HfDatasetConfig) -> Rows:
        """The split's rows."""
        path = Path(config.path)
        why = not_a_file(path)
        if why not in ("", FOLDER) and _is_local(config):
            # `datasets` would ask the hub for a minute first.
            raise BadRowError(_not_found(config))
        origin = f"{config.path}[{config.split}]"
        if not why and path.suffix == ".jsonl" and "[" not in config.split:
            # `datasets` would reject the whole file because of one unreadable line.
            rows = _read_lines(config, config.path)
            return replace(rows, id_numbers=range(len(rows.rows)), origin=origin)
        dataset = _open(config)
        table = _UndecodedRows(dataset.select_columns(_columns_read(config, dataset.column_names)))
        local = path if path.exists() else Path()
        folder = local if local.is_dir() else local.parent
        return Rows(
            rows=table,
            numbers=range(1, len(table) + 1),
            id_numbers=range(len(table)),
            origin=origin,
            version=dataset._fingerprint,
            columns=config.columns,
            folder=Path(config.image_folder or folder),
            keys=set(dataset.column_names),
        )


class _UndecodedRows(Sequence[Mapping[str, Any]]):
    """Rows as Arrow holds them, pictures as their bytes or paths: `datasets` would decode them
    without our checks."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset.with_format("arrow")

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        return self._dataset[index].to_pylist()[0]


def _open(config: HfDatasetConfig) -> Dataset:
    import datasets

    path = Path(config.path)
    try:
        if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            return _split_of_saved(config, datasets.load_from_disk(config.path))
        if not path.is_file():
            name, revision = config.name or None, config.revision or None
            return datasets.load_dataset(config.path, name, split=config.split, revision=revision)
        if path.suffix not in _BUILDERS:
            types = ", ".join(_BUILDERS)
            raise BadRowError(f"{path}: files of type {types} are read, not {path.suffix!r}")
        return datasets.load_dataset(  # nosec B615 # a file on this machine
            _BUILDERS[path.suffix],
            data_files={config.split.split("[")[0]: config.path},
            split=config.split,
        )
    except BadRowError:
        raise
    except (FileNotFoundError, ConnectionError, datasets.exceptions.DatasetNotFoundError) as error:
        raise BadRowError(f"{_not_found(config)} ({error})") from error
    # Unknown split or configuration: the message of `datasets` lists the known ones. Damaged data
    # may raise anything (ArrowInvalid, UnicodeDecodeError, KeyError, TypeError, OSError).
    except Exception as error:
        cause = excerpt(str(error.__cause__ or error), MAX_SHOWN)
        raise BadRowError(f"{config.path}: cannot be read ({cause})") from error


def _split_of_saved(config: HfDatasetConfig, saved: Any) -> Dataset:
    """A split of what `save_to_disk` wrote, with or without named splits."""
    splits = saved if isinstance(saved, Mapping) else {config.split.partition("[")[0]: saved}
    if config.split not in splits:
        raise BadRowError(
            f"{config.path}: has no split {config.split!r}; it has {', '.join(splits)}, and slices "
            "of a set that save_to_disk wrote cannot be read: save it as parquet"
        )
    return splits[config.split]


def _is_local(config: HfDatasetConfig) -> bool:
    """Whether `path` can only be meant as a local one: it exists, has a data file's ending, or is
    no 'owner/name'."""
    path = Path(config.path)
    is_hub_id = config.path.count("/") == 1 and config.path[0] not in "./~"
    return not_a_file(path) != MISSING or path.suffix in _BUILDERS or not is_hub_id


def _columns_read(config: HfDatasetConfig, available: Sequence[str]) -> list[str]:
    """The columns of a table that its samples need. Raises BadRowError for missing ones; of a
    nested column 'a.b' only 'a' is looked for."""
    columns = config.columns
    required = [*columns.named]
    if not columns.source_optional:
        required += columns.sources(available)
    missing = [n for n in required if n not in available and n.split(".")[0] not in available]
    if missing:
        raise BadRowError(
            f"{config.path}: has no column {', '.join(map(repr, missing))}; it has "
            f"{', '.join(available)}. Map them in the source's `columns`."
        )
    read = columns.read()
    top_level = {name.split(".")[0] for name in read}
    return [name for name in available if name in read | top_level]


def _not_found(config: HfDatasetConfig) -> str:
    path = excerpt(config.path, MAX_SHOWN)
    return (
        f"{path}: neither a file or folder here ({Path.cwd()}) nor a data set on the hub that can "
        "be reached; give a local path, or a hub id 'owner/name' with network access"
    )


# ---- prompts -------------------------------------------------------------------------------------
# Reads users' prompts for pictures: the built-in 256, or a file of your own.

BUILT_IN = Path(__file__).parent / "prompts"
"""Has one JSONL file per split. Of the 32 prompts of each of eight categories, the last 8 are held
out. Categories alternate in a file, so that the first n lines are balanced."""


def is_no_jsonl(path: str) -> bool:
    return not path.endswith(".jsonl")


class PromptsConfig(FileConfig):
    """The built-in prompts, or a file of prompts."""

    path: str = ""
    """A .txt file with a prompt per line, or a .jsonl file with an object per line; relative paths
    start at the working directory. '' = the built-in set."""
    split: Annotated[Literal["train", "held_out", "all"], Unread("path", bool)] = "train"
    """Part of the built-in set: 192 prompts, the other 64, or all. A user's file is not split."""
    prompt_key: Annotated[str, Unread("path", is_no_jsonl)] = "prompt"
    """For a .jsonl file: the key of the prompt; keys 'id' and 'category' are read if present."""
    picture_key: Annotated[str, Unread("path", is_no_jsonl)] = ""
    """For a .jsonl file: the key of the path to the prompt's picture, relative to the file's own
    folder; rows without it are text only. '' = no row has a picture."""

    @model_validator(mode="after")
    def _refuse_other_files(self) -> PromptsConfig:
        if self.path and is_no_jsonl(self.path) and not self.path.endswith(".txt"):
            raise ValueError(f"path: {self.path!r} is neither .txt nor .jsonl")
        return self


class Prompts(RowsSource[PromptsConfig]):
    """Prompts: the built-in ones, or those of a text or JSONL file."""

    @classmethod
    def read(cls, config: PromptsConfig) -> Rows:
        splits = ("train", "held_out") if config.split == "all" else (config.split,)
        files = [Path(config.path)] if config.path else [BUILT_IN / f"{n}.jsonl" for n in splits]
        parse = (lambda line: {"prompt": line}) if config.path.endswith(".txt") else None
        lines = Lines(*files, parse=parse)
        keys = PromptsConfig() if is_no_jsonl(config.path) else config
        columns = Columns(
            instruction=keys.prompt_key, source=keys.picture_key, source_optional=True
        )
        return Rows(
            rows=lines,
            numbers=lines.numbers,
            id_numbers=lines.numbers,
            origin=config.path or f"prompts[{config.split}]",
            version=lines.version,
            columns=columns,
            folder=Path(config.path).parent,
        )
