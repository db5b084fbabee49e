"""Replies already paid for, on disk: a resumed iteration asks only for what it does not have, and
is exact even under a judge that samples. Scrubbed of keys, and readable to this user alone. What a
full disk does not take is asked again after a restart. No lock: one process per file."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from rl.files.atomic import FULL, append, lines_of, row_of
from rl.files.private import private
from rl.record.scrub import scrub

log = logging.getLogger(__name__)


class ReplyJournal:
    """Key -> raw reply. The first reply under a key stays."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._replies = _load(path)
        self._path = path
        self._num_lost = 0
        self._file = open(path, "ab", buffering=0, opener=private)  # noqa: SIM115 - `close`

    def get(self, key: str) -> str | None:
        return self._replies.get(key)

    def put(self, key: str, reply: str) -> str:
        """On disk (past this process, not past a power cut) when this returns; returns the reply as
        it is kept, which is how a resumed run will read it."""
        kept = self._replies.setdefault(key, scrub(reply))
        try:
            append(self._file, (json.dumps({"key": key, "reply": kept}) + "\n").encode())
        except OSError as error:
            if error.errno not in FULL:
                raise
            if not self._num_lost:
                log.warning(
                    "%s: %s; replies are not kept until there is room, and would be asked for "
                    "again after a restart", self._path, error.strerror
                )  # fmt: skip
            self._num_lost += 1
        return kept

    def close(self) -> None:
        self._file.close()


def _load(path: Path) -> dict[str, str]:
    if not path.exists():
        return {}
    lines = lines_of(path)
    if lines and not lines[-1].endswith(b"\n"):
        # A process killed while writing leaves half a line; the next line must not join it.
        with path.open("r+b") as file:
            file.truncate(sum(map(len, lines[:-1])))
        lines.pop()
    replies: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        match row_of(line):
            case {"key": str(key), "reply": str(reply)}:
                replies.setdefault(key, reply)
            case _:
                log.warning("%s line %d is no journal entry; it will be asked again", path, number)
    return replies
