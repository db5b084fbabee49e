"""Reads a Hugging Face data set: a hub id, or local parquet, arrow, csv or json files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl.api.data import RowRules
from rl.api.plugin import unread
from rl.config.paths import FOLDER, GONE, not_a_file
from rl.data.shared.jsonl import read_lines, read_rows
from rl.data.shared.sample_rows import MAX_SHOWN, SEVERAL, BadRowError, Rows, RowsConfig, RowsSource
from rl.text.untrusted import excerpt

if TYPE_CHECKING:
    from datasets import Dataset

_BUILDERS = {
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".csv": "csv",
    ".json": "json",
    ".jsonl": "json",
}


class Config(RowsConfig):
    """One split of one data set."""

    path: str
    """Hub id ('owner/name'), or a local file or folder (also one written by `save_to_disk`); a
    local path wins if it exists. A relative path starts at the working directory."""
    name: str = ""
    """The data set's configuration on the hub, '' = its only or default one."""
    revision: str = ""
    """Branch, tag or commit on the hub, '' = the newest."""
    split: str = "train"
    """Split; slices such as 'train[:95%]' work unless `save_to_disk` wrote it."""


class HfDataset(RowsSource[Config]):
    """One split as samples."""

    @classmethod
    def count(cls, config: Config) -> int | None:
        """Rows of a parquet file, bad ones included; None if counting needs the set opened."""
        path = Path(config.path)
        if path.suffix != ".parquet" or not_a_file(path) or "[" in config.split:
            return None
        from pyarrow import ArrowInvalid, parquet

        try:
            num_rows: int = parquet.read_metadata(path).num_rows
        except (ArrowInvalid, OSError):
            return None
        return num_rows

    @classmethod
    def problems(cls, config: Config, rules: RowRules) -> list[str]:
        """Problems found without `datasets`: a missing path; columns that a parquet file lacks."""
        path = Path(config.path)
        why = not_a_file(path)
        if why == GONE:
            may_be_hub_id = config.path.count("/") == 1 and path.suffix not in _BUILDERS
            return [] if may_be_hub_id and config.path[0] not in "./~" else [_not_found(config)]
        if why not in ("", FOLDER):
            return [
                f"{excerpt(config.path, MAX_SHOWN)} {why}; give a data set's file, folder or id"
            ]
        try:
            if not why:
                _builder(path)
            if path.suffix == ".parquet":
                import pyarrow.parquet

                _require_columns(config, pyarrow.parquet.read_schema(path).names)
        except (BadRowError, OSError) as error:
            return [str(error)]
        except ValueError as error:  # pyarrow's complaint about a file that is not parquet
            return [f"{path}: {error}"]
        return []

    @classmethod
    def no_effect(cls, config: Config) -> Iterable[str]:
        yield from super().no_effect(config)
        if Path(config.path).is_file():
            yield from unread(config, "name revision", "path is a file")

    @classmethod
    def read(cls, config: Config, rules: RowRules) -> Rows:
        """The split's rows."""
        if problems := cls.problems(config, rules):  # at once; the hub is asked for a minute
            raise BadRowError(problems[0])
        path = Path(config.path)
        origin = f"{config.path}[{config.split}]"
        rows: Sequence[Mapping[str, Any]]
        unreadable: list[str] = []
        if path.suffix == ".jsonl" and path.is_file() and "[" not in config.split:
            # `datasets` would reject the whole file because of one unreadable line.
            lines = enumerate(line for _, line in read_lines(path))
            objects, numbers, unreadable = read_rows(lines, origin)
            names = list(dict.fromkeys(key for row in objects for key in row))
            if objects:
                _require_columns(config, names)
            # As in a table, every row has every column.
            rows = [{name: row.get(name) for name in names} for row in objects]
        else:
            dataset = _open(config)
            _require_columns(config, dataset.column_names)
            numbers = list(range(len(dataset)))
            needed = {*config.columns.texts(), config.columns.target}
            needed |= {*config.columns.sources(), *config.columns.read_from({SEVERAL}).sources()}
            top_level = needed | {column.split(".")[0] for column in needed}
            names = [column for column in dataset.column_names if column in top_level]
            rows = _UndecodedRows(dataset.select_columns(names))
        folder = path if path.is_dir() else path.parent if path.exists() else Path()
        folder = Path(config.image_folder) if config.image_folder else folder
        check = config.picture_check
        return Rows(rows, numbers, origin, config.columns, folder, rules, unreadable, check)


class _UndecodedRows(Sequence[Mapping[str, Any]]):
    """Rows as Arrow holds them, pictures as their bytes or paths: `datasets` would decode them
    without our checks."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset.with_format("arrow")

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        return self._dataset[index].to_pylist()[0]


def _open(config: Config) -> Dataset:
    import datasets

    path = Path(config.path)
    try:
        if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            return _split_of_saved(config, datasets.load_from_disk(config.path))
        if path.is_file():
            return datasets.load_dataset(  # nosec B615 # a file on this machine
                _builder(path),
                data_files={config.split.split("[")[0]: config.path},
                split=config.split,
            )
        return datasets.load_dataset(
            config.path, config.name or None, split=config.split, revision=config.revision or None
        )
    except BadRowError:
        raise
    except datasets.exceptions.DatasetGenerationError as error:
        raise BadRowError(
            f"{config.path}: cannot be read ({excerpt(str(error.__cause__ or error), MAX_SHOWN)})"
        ) from error
    except (FileNotFoundError, ConnectionError, datasets.exceptions.DatasetsError) as error:
        raise BadRowError(f"{_not_found(config)} ({error})") from error
    # Unknown split or configuration: the message of `datasets` lists the known ones. Damaged data
    # may raise anything (ArrowInvalid, UnicodeDecodeError, KeyError, TypeError, OSError).
    except Exception as error:
        raise BadRowError(f"{config.path}: {excerpt(str(error), MAX_SHOWN)}") from error


def _split_of_saved(config: Config, saved: Any) -> Dataset:
    """A split of what `save_to_disk` wrote, with or without named splits."""
    splits = saved if isinstance(saved, Mapping) else {config.split.partition("[")[0]: saved}
    if config.split not in splits:
        raise BadRowError(
            f"{config.path}: has no split {config.split!r}; it has {', '.join(splits)}, and slices "
            "of a set that save_to_disk wrote cannot be read: save it as parquet"
        )
    return splits[config.split]


def _builder(path: Path) -> str:
    if path.suffix not in _BUILDERS:
        raise BadRowError(
            f"{path}: files of type {', '.join(_BUILDERS)} are read, not {path.suffix!r}"
        )
    return _BUILDERS[path.suffix]


def _require_columns(config: Config, available: Sequence[str]) -> None:
    """Raises BadRowError for missing columns. Of a nested column 'a.b' only 'a' is checked here."""
    missing = [
        column
        for column in config.columns.read_from(available).required()
        if column not in available and column.split(".")[0] not in available
    ]
    if missing:
        raise BadRowError(
            f"{config.path}: has no column {', '.join(map(repr, missing))}; it has "
            f"{', '.join(available)}. Map them in the source's `columns`."
        )


def _not_found(config: Config) -> str:
    return (
        f"{config.path}: neither a file or folder here ({Path.cwd()}) nor a data set on the hub "
        "that can be reached; give a local path, or a hub id 'owner/name' with network access"
    )
