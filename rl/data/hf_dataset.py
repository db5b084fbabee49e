"""A Hugging Face data set: a hub id, or a local parquet, arrow, csv or json file or folder.

`datasets` runs no code from a data set's repository (it dropped loading scripts), and is imported
when a run starts, never by a config check.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl.api.data import RowRules
from rl.api.plug import unread
from rl.config.paths import FOLDER, GONE, not_a_file
from rl.data.shared.jsonl import read_lines, read_rows
from rl.data.shared.rows import (
    MAX_SHOWN,
    SEVERAL,
    BadRowError,
    Columns,
    Rows,
    RowsConfig,
    RowsSource,
    pick,
)
from rl.record.untrusted import shown

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
    """Hub id ('owner/name'), or a local file or folder (also one written by `save_to_disk`); what
    exists locally is taken as local. A relative path counts from the working directory."""
    name: str = ""
    """The data set's configuration on the hub, '' = its only or default one."""
    revision: str = ""
    """Branch, tag or commit on the hub, '' = the newest."""
    split: str = "train"
    """Split; slices such as 'train[:95%]' work unless `save_to_disk` wrote it."""
    where: dict[str, str | int | float | bool] = {}
    """Column -> value: only rows that have exactly these values, e.g. {complexity: 8}."""


class HfDataset(RowsSource[Config]):
    """One split as samples."""

    @classmethod
    def provides(cls, config: Config) -> frozenset[str]:
        return config.columns.provides()

    @classmethod
    def count(cls, config: Config) -> int | None:
        """Rows of a parquet file, bad ones included; None when only opening the set would tell."""
        path = Path(config.path)
        if path.suffix != ".parquet" or not_a_file(path) or config.where or "[" in config.split:
            return None
        from pyarrow import ArrowInvalid, parquet

        try:
            num_rows: int = parquet.read_metadata(path).num_rows
        except (ArrowInvalid, OSError):
            return None
        return num_rows

    @classmethod
    def problems(cls, config: Config, rules: RowRules) -> list[str]:
        """What can be seen without `datasets`: is it there, and has a parquet file the columns."""
        path = Path(config.path)
        why = not_a_file(path)
        if why == GONE:
            may_be_hub_id = config.path.count("/") == 1 and path.suffix not in _BUILDERS
            return [] if may_be_hub_id and config.path[0] not in "./~" else [_nowhere(config)]
        if why not in ("", FOLDER):
            return [f"{shown(config.path, MAX_SHOWN)} {why}; give a data set's file, folder or id"]
        try:
            if not why:
                _builder(path)
            if path.suffix == ".parquet":
                import pyarrow.parquet

                _require_columns(config, pyarrow.parquet.read_schema(path).names)
        except (BadRowError, OSError) as error:
            return [str(error)]
        except ValueError as error:  # pyarrow's complaint about a file that is no parquet
            return [f"{path}: {error}"]
        return []

    @classmethod
    def no_effect(cls, config: Config) -> Iterable[str]:
        yield from super().no_effect(config)
        if Path(config.path).is_file():
            yield from unread(config, "name revision", "path is a file")

    @classmethod
    def read(cls, config: Config, rules: RowRules) -> tuple[Rows, list[str]]:
        """The split's rows; nothing but the mapped columns is ever kept."""
        path = Path(config.path)
        found: Sequence[Mapping[str, Any]]
        if path.suffix == ".jsonl" and path.is_file() and "[" not in config.split:
            found, numbers, unreadable = _read_lines(config)
        else:
            dataset = _open(config)
            _require_columns(config, dataset.column_names)
            numbers, unreadable = _matching(config, dataset), []
            dataset = dataset.select(numbers)
            dataset = dataset.select_columns(_mapped(config.columns, dataset.column_names))
            found = _undecoded(dataset, config.columns)
        folder = path if path.is_dir() else path.parent if path.exists() else Path()
        rows = Rows(
            found,
            numbers,
            f"{config.path}[{config.split}]",
            config.columns,
            Path(config.image_folder) if config.image_folder else folder,
            rules,
            config.picture_check,
        )
        return rows, unreadable


def _read_lines(config: Config) -> tuple[list[dict[str, Any]], list[int], list[str]]:
    """(rows, their numbers, a sentence for each line that is none) of a file of lines: `datasets`
    would give up the whole file for one of them."""
    path = Path(config.path)
    lines = list(enumerate(line for _, line in read_lines(path)))
    objects, numbers, unreadable = read_rows(lines, f"{path}[{config.split}]")
    available = list(dict.fromkeys(key for row in objects for key in row))
    if objects:
        _require_columns(config, available)
    for column, value in config.where.items():
        cells = [pick(row, column, None) for row in objects]
        kept = [k for k, cell in enumerate(cells) if cell == value]
        _require_some(config, column, kept, cells)
        objects, numbers = [objects[k] for k in kept], [numbers[k] for k in kept]
    names = _mapped(config.columns, available)
    return [{name: row.get(name) for name in names} for row in objects], numbers, unreadable


def _mapped(columns: Columns, available: Sequence[str]) -> list[str]:
    named = {*columns.texts(), *columns.pictures(), *columns.hidden.values()}
    named |= {*columns.read_from({SEVERAL}).sources()}
    tops = named | {column.split(".")[0] for column in named}
    return [column for column in available if column in tops]


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
            f"{config.path}: cannot be read ({shown(str(error.__cause__ or error), MAX_SHOWN)})"
        ) from error
    except (FileNotFoundError, ConnectionError, datasets.exceptions.DatasetsError) as error:
        raise BadRowError(f"{_nowhere(config)} ({error})") from error
    # Unknown split or configuration: `datasets` lists the known ones. What is damaged fails in any
    # way (ArrowInvalid, UnicodeDecodeError, KeyError, TypeError, OSError).
    except Exception as error:
        raise BadRowError(f"{config.path}: {shown(str(error), MAX_SHOWN)}") from error


def _split_of_saved(config: Config, saved: Any) -> Dataset:
    if "[" in config.split:
        raise BadRowError(
            f"{config.path}: was written by save_to_disk and cannot be sliced by {config.split!r}; "
            "save the slice, or save it as parquet"
        )
    if not isinstance(saved, Mapping):
        return saved
    if config.split not in saved:
        raise BadRowError(
            f"{config.path}: has no split {config.split!r}; it has {', '.join(saved)}"
        )
    return saved[config.split]


def _builder(path: Path) -> str:
    if path.suffix not in _BUILDERS:
        raise BadRowError(
            f"{path}: files of type {', '.join(_BUILDERS)} are read, not {path.suffix!r}"
        )
    return _BUILDERS[path.suffix]


def _require_columns(config: Config, available: Sequence[str]) -> None:
    """Nested columns ('a.b') are known by their first part here, by the rest when a row is read."""
    missing = [
        column
        for column in [*config.columns.read_from(available).required(), *config.where]
        if column not in available and column.split(".")[0] not in available
    ]
    if missing:
        raise BadRowError(
            f"{config.path}: has no column {', '.join(map(repr, missing))}; it has "
            f"{', '.join(available)}. Map them in the source's `columns`."
        )


def _matching(config: Config, dataset: Dataset) -> list[int]:
    """Numbers of the rows that `where` lets through."""
    numbers = list(range(len(dataset)))
    for column, value in config.where.items():
        top = column if column in dataset.column_names else column.split(".")[0]
        try:
            held = list(dataset.select_columns([top])[top])
        except Exception as error:  # a cell that is no UTF-8, a damaged page
            raise BadRowError(f"{config.path}: column {top!r} cannot be read ({error})") from error
        cells = [pick({top: cell}, column, None) for cell in held]
        numbers = [number for number in numbers if cells[number] == value]
        _require_some(config, column, numbers, cells)
    return numbers


def _require_some(
    config: Config, column: str, numbers: Sequence[int], cells: Iterable[Any]
) -> None:
    if not numbers:
        raise BadRowError(
            f"{config.path}[{config.split}]: no row is left by where {column!r} = "
            f"{config.where[column]!r}; the column holds {_some(cells)}"
        )


def _some(cells: Iterable[Any]) -> str:
    distinct = list(dict.fromkeys(f"{cell!r:.60}" for cell in cells))
    return ", ".join(distinct[:8]) + (", ..." if len(distinct) > 8 else "")


def _undecoded(dataset: Dataset, columns: Columns) -> Dataset:
    """Pictures, whatever they are nested in, as their bytes or paths: `datasets` would decode
    without our checks."""
    for column in {*columns.pictures(), *columns.read_from({SEVERAL}).sources()}:
        top = column if column in dataset.features else column.split(".")[0]
        held = dataset.features.get(top)
        if held is not None and (raw := _raw(held)) != held:
            dataset = dataset.cast_column(top, raw)
    return dataset


def _raw(feature: Any) -> Any:
    """The same type, its pictures not decoded."""
    import datasets

    match feature:
        case datasets.Image():
            return datasets.Image(decode=False)
        case datasets.List():
            return datasets.List(_raw(feature.feature), length=feature.length)
        case datasets.LargeList():
            return datasets.LargeList(_raw(feature.feature))
        case dict():
            return {name: _raw(inner) for name, inner in feature.items()}
    return feature


def _nowhere(config: Config) -> str:
    return (
        f"{config.path}: neither a file or folder here ({Path.cwd()}) nor a data set on the hub "
        "that can be reached; give a local path, or a hub id 'owner/name' with network access"
    )
