"""Journals the judge's replies: a resumed iteration asks only for those that it lacks."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path

from rl.files import append, current_path, lines_of, private, row_of
from rl.printing import scrub

log = logging.getLogger(__name__)


class ReplyJournal:
    """Key -> raw reply; the first reply under a key is kept."""

    def __init__(self, path: Path) -> None:
        path = current_path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._replies = _load(path)
        self._path = path
        self._has_warned = False
        self._failed: set[str] = set()
        """Keys of the replies to questions for which no reply was usable."""
        self._file = open(path, "ab", buffering=0, opener=private)  # noqa: SIM115 - `close`

    def get(self, key: str) -> str | None:
        return self._replies.get(key)

    def put(self, key: str, reply: str) -> str:
        """Write the reply to disk; returns it as stored, which is what a resumed run reads."""
        kept = self._replies.setdefault(key, scrub(reply))
        self._write(key, kept)
        return kept

    def note_failed(self, keys: Iterable[str]) -> None:
        """Remember that the replies under `keys` did not answer their question."""
        self._failed.update(keys)

    def drop_unusable(self) -> None:
        """Drop the replies that `note_failed` noted: they are requested again, also on resume."""
        while self._failed:
            key = self._failed.pop()
            if self._replies.pop(key, None) is not None:
                self._write(key, None)

    def _write(self, key: str, reply: str | None) -> None:
        """Append an entry; `reply` None cancels the file's earlier entry under that key."""
        try:
            append(self._file, (json.dumps({"key": key, "reply": reply}) + "\n").encode())
        except Exception as error:  # whatever the error, the reply is in memory
            if not self._has_warned:
                self._has_warned = True
                reason = getattr(error, "strerror", None) or repr(error)
                log.warning(
                    "%s: %s; replies that are not saved will be asked for again after a restart",
                    self._path,
                    reason,
                )

    def close(self) -> None:
        self._file.close()


def _load(path: Path) -> dict[str, str]:
    lines = lines_of(path)
    if lines and not lines[-1].endswith(b"\n"):
        # A process killed while writing leaves half a line; the next line must not join it.
        with open(path, "r+b", opener=private) as file:
            file.truncate(sum(map(len, lines[:-1])))
        lines.pop()
    replies: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        match row_of(line):
            case {"key": str(key), "reply": str(reply)}:
                replies.setdefault(key, reply)
            case {"key": str(key), "reply": None}:
                replies.pop(key, None)
            case _:
                log.warning("%s line %d is not an entry; its question is asked again", path, number)
    return replies
