"""Reads files with one row per line; a row is parsed when it is asked for."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rl.config.loading import not_a_file
from rl.data.shared.sample_pictures import UnusableError
from rl.data.shared.sample_rows import MAX_SHOWN, BadRowError
from rl.printing import excerpt


class Lines(Sequence[Mapping[str, Any]]):
    """The lines of files that are not blank, as rows.

    The files' bytes stay in memory, so that a file may change while a run reads it; the rows do
    not, which would take several times as much. Only a line feed ends a line: a value may hold
    U+2028 and similar characters.
    """

    def __init__(self, files: Sequence[Path], parse: Callable[[str], Any] | None = None) -> None:
        """`parse`: converts a line to a row; None = JSON, where an object with a repeated key is
        refused. Raises BadRowError if a file does not exist, is empty or cannot be read."""
        self._parse = parse or json.JSONDecoder(object_pairs_hook=_unique_keys).decode
        self.numbers = array("Q")
        """The number of each row's line in its file, from 1."""
        self.nulls: Mapping[str, None] = {}
        """Keys that every row gets."""
        self._starts = array("Q")
        contents = [_content(file) for file in files]
        self._content = b"\n".join(contents)
        start = 0
        for file, content in zip(files, contents, strict=True):
            end, number, num_before = start + len(content), 0, len(self._starts)
            while start <= end:
                number += 1
                stop = self._content.find(b"\n", start, end)
                stop = end if stop < 0 else stop
                if not self._content[start:stop].isspace() and stop > start:
                    self._starts.append(start)
                    self.numbers.append(number)
                start = stop + 1
            if len(self._starts) == num_before:
                raise BadRowError(f"{file} is empty; write one row per line")

    @property
    def version(self) -> str:
        """A hash of the files' bytes."""
        return hashlib.sha256(self._content).hexdigest()

    def readable(self) -> Iterator[Mapping[str, Any]]:
        """The rows that can be read."""
        for index in range(len(self)):
            with suppress(UnusableError):
                yield self[index]

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: Any) -> Any:
        """Raises UnusableError for a line that is no row."""
        start = self._starts[index]
        stop = self._content.find(b"\n", start)
        try:
            line = self._content[start : None if stop < 0 else stop].strip().decode("utf-8")
            row = self._parse(line)
        except UnicodeDecodeError as error:
            raise UnusableError("is not UTF-8; save the file as UTF-8") from error
        except (ValueError, RecursionError) as error:  # also too long numbers, too deep nesting
            raise UnusableError(f"is not JSON ({error}); one object per line") from error
        if not isinstance(row, dict):
            raise UnusableError('is not an object {"key": ...}')
        return {**self.nulls, **row} if self.nulls else row


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The pairs as a dict. Raises ValueError for a repeated key."""
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in row if names.count(name) > 1)
        raise ValueError(f"it has {repeated!r:.60} twice")
    return row


def _content(path: Path) -> bytes:
    if why := not_a_file(path):
        raise BadRowError(
            f"{excerpt(str(path), MAX_SHOWN)} {why}; give the file's path (from {Path.cwd()})"
        )
    try:
        return path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise BadRowError(f"{path} cannot be read ({error.strerror})") from error
