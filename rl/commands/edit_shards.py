"""Making one file per edit in several processes, so that nothing is lost, doubled or half written.

Workers are spawned, so that each may hold a GPU. No two edits share a file and every edit is in one
batch; a file is written aside and renamed, so that its being there means that it is done. The list
is written last, by one process.
"""

from __future__ import annotations

import fcntl
import json
import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rl.data.emu3_tokens.files import SUFFIX, TokenisedEdit, is_whole, write
from rl.files.atomic import write_atomically
from rl.ranks.signals import die_with_parent
from rl.record.progress import counted

LIST = "tokenized_datalist.json"


class CannotPrepare(Exception):  # noqa: N818 - it is a message to the user
    """What is wrong and how to go on."""


@dataclass(frozen=True)
class Edit:
    """One edit to be made."""

    number: int
    """Of the row or list entry, from 0."""
    name: str
    """Of its file, without suffix; no two edits share one."""


Maker = Callable[[Sequence[Edit]], list[TokenisedEdit | str]]
"""The edits of a small batch, each made, or the reason why not."""
_maker: Callable[[], Maker]
"""In a worker: its own."""


@contextmanager
def locked(output: Path) -> Iterator[None]:
    """One run at a time per output folder; the lock goes with the process, however it ends."""
    (output / "list").mkdir(parents=True, exist_ok=True)
    (output / "feature").mkdir(exist_ok=True)
    with (output / "list" / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CannotPrepare(
                f"another run is writing {output}; wait for it, or choose another --output-path"
            ) from error
        for left_over in (output / "feature").glob(".*.tmp"):
            left_over.unlink(missing_ok=True)
        yield


def continue_only_the_same(output: Path, made_from: Mapping[str, Any]) -> None:
    """Refuse to mix edits of two makings in one folder."""
    file = output / "list" / "made_from.json"
    wanted = json.loads(json.dumps(made_from))
    if file.is_file():
        found = json.loads(file.read_text())
        changed = [key for key in {**wanted, **found} if wanted.get(key) != found.get(key)]
        if changed:
            raise CannotPrepare(
                f"{output} was begun with "
                + ", ".join(f"{key} {found.get(key)!r}" for key in changed)
                + ", not "
                + ", ".join(repr(wanted.get(key)) for key in changed)
                + "; continue with the same, or choose another --output-path"
            )
    elif any((output / "feature").iterdir()) or (output / "list" / LIST).is_file():
        raise CannotPrepare(f"{output} holds another set; choose another --output-path")
    write_atomically(file, json.dumps(wanted, indent=2))


def make_all(
    output: Path,
    edits: Sequence[Edit],
    makers: Sequence[Callable[[], Maker]],
    batch_size: int,
    on_bad_row: str,
) -> tuple[int, list[str]]:
    """Make every edit that is not there yet, one worker per maker, then write the list.

    Returns how many the list names, and why others are left out.
    """
    context = multiprocessing.get_context("spawn")
    waiting = context.SimpleQueue()
    for maker in makers:
        waiting.put(maker)
    feature = output / "feature"
    batches = [edits[k : k + batch_size] for k in range(0, len(edits), batch_size)]
    bad: dict[int, str] = {}
    with ProcessPoolExecutor(len(makers), context, begin, (waiting,)) as pool:
        sizes = {pool.submit(work, batch, feature, on_bad_row): len(batch) for batch in batches}
        try:
            with counted("edits", len(edits)) as progress:
                for future, size in sizes.items():
                    bad |= future.result()
                    progress.step(size)
        except Exception as error:
            pool.shutdown(cancel_futures=True)
            known = isinstance(error, CannotPrepare)
            reason = str(error) if known else f"a worker died: {error!r}"
            raise CannotPrepare(
                f"{reason}\nWhat is done is kept; start the same command again to go on"
            ) from error
    entries = [edit.name + SUFFIX for edit in edits if edit.number not in bad]
    if not entries:
        raise CannotPrepare(f"no row is left, e.g. {next(iter(bad.values()), 'there was none')}")
    content = {"prefix": str(feature.resolve()), "path_list": entries}
    write_atomically(output / "list" / LIST, json.dumps(content))
    return len(entries), [bad[number] for number in sorted(bad)]


def begin(waiting: Any) -> None:
    """In a worker: it has one of the makers that wait, made with its first edit."""
    global _maker
    die_with_parent()  # an orphan of the pool would wait for work for ever
    _maker = cache(waiting.get())


def work(edits: Sequence[Edit], feature: Path, on_bad_row: str) -> dict[int, str]:
    """In a worker: make and write a batch; returns number -> reason of those that cannot be."""
    missing = [edit for edit in edits if not is_whole(feature / (edit.name + SUFFIX))]
    bad: dict[int, str] = {}
    for edit, made in zip(missing, _maker()(missing) if missing else [], strict=True):
        if isinstance(made, TokenisedEdit):
            write(feature / (edit.name + SUFFIX), made)
        elif on_bad_row == "error":
            raise CannotPrepare(f"{made}\nMend it, or leave such out with --on-bad-row skip")
        else:
            bad[edit.number] = made
    return bad
