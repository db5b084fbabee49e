"""Making one file per edit in several processes, so that nothing is lost, doubled or half written.

Workers are spawned, so that each may hold a GPU. No two edits share a file and every file belongs
to one worker's shard; it is written aside and renamed, so that its being there means that it is
done. The list is written last, by one process.
"""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.data.emu3_tokens.files import SUFFIX, TokenisedEdit, is_whole, write
from rl.files.atomic import write_atomically

LIST = "tokenized_datalist.json"
PROGRESS_S = 5.0
_counter: Any = None
"""In a worker: edits dealt with so far by all of them, shared."""
_stop: Any = None
"""In a worker: set when another one failed."""
_main_pid = 0
"""In a worker: the process it works for."""


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
    """Make every edit that is not there yet, one worker and shard per maker, then write the list.

    Returns how many the list names, and why others are left out.
    """
    context = multiprocessing.get_context("spawn")
    counter, stop = context.Value("q", 0), context.Event()
    feature = output / "feature"
    with ProcessPoolExecutor(len(makers), context, share, (counter, stop, os.getpid())) as pool:
        shards = [edits[k :: len(makers)] for k in range(len(makers))]
        futures = [
            pool.submit(work, make, shard, feature, batch_size, on_bad_row)
            for make, shard in zip(makers, shards, strict=True)
        ]
        watch(futures, counter, stop, len(edits))
        outcomes = [future.result() for future in futures]
    bad = {number: reason for outcome in outcomes for number, reason in outcome.items()}
    entries = [edit.name + SUFFIX for edit in edits if edit.number not in bad]
    if not entries:
        raise CannotPrepare(f"no row is left, e.g. {next(iter(bad.values()), 'there was none')}")
    content = {"prefix": str(feature.resolve()), "path_list": entries}
    write_atomically(output / "list" / LIST, json.dumps(content))
    return len(entries), [bad[number] for number in sorted(bad)]


def watch(futures: Sequence[Future[dict[int, str]]], counter: Any, stop: Any, total: int) -> None:
    """Print progress until all are done; the first failure stops the others at their next batch."""
    start, pending = time.monotonic(), set(futures)
    while pending:
        done, pending = wait(pending, timeout=PROGRESS_S, return_when=FIRST_COMPLETED)
        for future in done:
            try:
                future.result()
            except Exception as error:
                stop.set()
                known = isinstance(error, CannotPrepare)
                reason = str(error) if known else f"a worker died: {error!r}"
                raise CannotPrepare(
                    f"{reason}\nWhat is done is kept; start the same command again to go on"
                ) from error
        rate = counter.value / max(time.monotonic() - start, 1e-9)
        print(f"{counter.value} of {total} edits ({rate:.1f}/s)", flush=True)


def share(counter: Any, stop: Any, main_pid: int) -> None:
    global _counter, _stop, _main_pid
    _counter, _stop, _main_pid = counter, stop, main_pid


def work(
    make_maker: Callable[[], Maker],
    edits: Sequence[Edit],
    feature: Path,
    batch_size: int,
    on_bad_row: str,
) -> dict[int, str]:
    """In a worker: make and write its edits; returns number -> reason of those that cannot be."""
    missing = [edit for edit in edits if not is_whole(feature / (edit.name + SUFFIX))]
    count(len(edits) - len(missing))
    bad: dict[int, str] = {}
    make = make_maker() if missing else None
    for start in range(0, len(missing), batch_size):
        if os.getppid() != _main_pid:
            os._exit(1)  # an orphan of the pool would wait for work for ever
        if _stop.is_set():
            break
        batch = missing[start : start + batch_size]
        assert make is not None
        for edit, made in zip(batch, make(batch), strict=True):
            if isinstance(made, TokenisedEdit):
                write(feature / (edit.name + SUFFIX), made)
            elif on_bad_row == "error":
                raise CannotPrepare(f"{made}\nMend it, or leave such out with --on-bad-row skip")
            else:
                bad[edit.number] = made
        count(len(batch))
    return bad


def count(num: int) -> None:
    with _counter.get_lock():
        _counter.value += num
