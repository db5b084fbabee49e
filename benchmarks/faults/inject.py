"""Injects an error or a signal into a process, at a call or at a file operation."""

from __future__ import annotations

import builtins
import errno
import importlib
import itertools
import os
import resource
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

TORN_BYTES = 64
"""Size to which files can grow once the simulated disk is full."""


def trigger(how: str, path: str | None = None) -> None:
    """Triggers the fault `how`: 'SIG...' sends this process that signal, 'deadlock' never returns,
    a name from `errno` raises OSError about `path`, another name raises that error of Python or
    torch."""
    if how == "deadlock":
        threading.Event().wait()
    if how.startswith("SIG"):
        os.kill(os.getpid(), signal.Signals[how])
        return
    if (number := getattr(errno, how, None)) is not None:
        raise OSError(number, os.strerror(number), path)
    import torch

    raise (getattr(builtins, how, None) or getattr(torch, how))("injected")


def end_at(where: str, count: int, how: str = "SIGKILL") -> None:
    """Triggers the fault before the count-th call of the function `module:Class.method`."""
    EndAt(where, count, how)(Path())


def end_at_phase(name: str, finished: int, how: str = "SIGKILL") -> None:
    """Triggers the fault when phase `name` first begins after `finished` iterations."""
    done = 0

    def note(_: object, iteration: int, *__: object) -> None:
        nonlocal done
        done = iteration

    def before(_: object, phase: str) -> None:
        if phase == name and done >= finished:
            trigger(how)

    at_calls("rl.run.saving:LastFinished.note", note)
    at_calls("rl.progress:PhaseTimer.phase", before)


def at_calls(where: str, before: Callable[..., object]) -> None:
    """Calls `before` with the arguments of every call of the function `module:a.b`."""
    module_name, _, path = where.partition(":")
    owner: Any = importlib.import_module(module_name)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    original = getattr(owner, name)

    def watched(*args: Any, **kwargs: Any) -> Any:
        before(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(owner, name, watched)


class FileOperation(NamedTuple):
    """An operation that changes a file or a folder."""

    name: str
    """write (the file is opened for writing), fsync, rename, remove, mkdir, rmdir, truncate."""
    path: str
    """Relative to the watched folder."""


_EVENTS = {
    "os.rename": "rename",
    "os.remove": "remove",
    "os.mkdir": "mkdir",
    "os.rmdir": "rmdir",
    "os.truncate": "truncate",
    "fault.write": "write",
    "fault.fsync": "fsync",
}
"""Audit event -> operation; the event `open` is a write if its flags say so."""
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_DIR_FD = {"os.remove": 1, "os.rmdir": 1, "os.mkdir": 2, "os.rename": 2}


def at_files(folder: Path, before: Callable[[FileOperation], None]) -> None:
    """Calls `before` ahead of each file operation in `folder`, in any thread, until this process
    ends. If `before` raises an error, the operation raises it."""
    _announce_native_writers()
    root = os.path.realpath(folder)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = args
            if isinstance(path, int) or not flags & _WRITING:
                return
            name = "write"
        elif event in _EVENTS:
            name, path = _EVENTS[event], args[0]
        else:
            return
        path = _absolute(path, args[_DIR_FD[event]] if event in _DIR_FD else -1)
        if path.startswith(root + os.sep):
            before(FileOperation(name, os.path.relpath(path, root)))

    sys.addaudithook(hook)


def _absolute(path: Any, folder_descriptor: int) -> str:
    """The absolute path of an audit event's path, which may be a file descriptor."""
    if isinstance(path, int):
        return os.readlink(f"/proc/self/fd/{path}")
    text = os.fsdecode(path)
    if folder_descriptor >= 0 and not os.path.isabs(text):
        text = os.path.join(os.readlink(f"/proc/self/fd/{folder_descriptor}"), text)
    return os.path.join(os.path.realpath(os.path.dirname(text)), os.path.basename(text))


def _announce_native_writers() -> None:
    """Raises audit events for fsync and for writers in Rust and C++, for which Python has none."""
    at_calls("safetensors.torch:serialize_file", lambda _, path, **__: _audit_write(path))
    at_calls("torch:save", lambda _, path, *__, **___: _audit_write(path))
    at_calls("os:fsync", lambda descriptor: sys.audit("fault.fsync", descriptor))


def _audit_write(path: Any) -> None:
    if isinstance(path, (str, os.PathLike)):
        sys.audit("fault.write", path)


Injection = Callable[[Path], None]
"""Called with the run folder in a rank's process before it trains: prepares a fault there."""


@dataclass(frozen=True)
class EndAt:
    """A fault before the count-th call of the function `module:Class.method`."""

    where: str
    count: int
    how: str = "SIGKILL"
    """As in `trigger`, or a key of `ACTIONS`."""

    def __call__(self, run_dir: Path) -> None:
        calls = itertools.count(1)

        def before(*_: object, **__: object) -> None:
            if next(calls) == self.count:
                ACTIONS.get(self.how, lambda _: trigger(self.how))(run_dir)

        at_calls(self.where, before)


@dataclass(frozen=True)
class FailAtFile:
    """Makes the count-th `operation` fail whose path in the run folder matches `pattern` (by
    `Path.match`)."""

    operation: str
    pattern: str
    count: int
    how: str
    """As in `trigger`; with a '+', all later operations fail, too. 'FULL': from then on no file of
    the process can grow beyond TORN_BYTES, so writes are cut off."""

    def __call__(self, run_dir: Path) -> None:
        count = 0

        def before(operation: FileOperation) -> None:
            nonlocal count
            if operation.name != self.operation or not Path(operation.path).match(self.pattern):
                return
            count += 1
            if self.how == "FULL" and count == self.count:
                _limit(resource.RLIMIT_FSIZE, TORN_BYTES)
            elif (self.how.endswith("+") and count >= self.count) or count == self.count:
                trigger(self.how.removesuffix("+"), str(run_dir / operation.path))

        at_files(run_dir, before)


def _limit(kind: int, value: int) -> None:
    resource.setrlimit(kind, (value, resource.getrlimit(kind)[1]))


def _close_console(_: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)
    os.dup2(writer, 2)


def _delete(run_dir: Path) -> None:
    while run_dir.exists():  # another thread may write at the same time
        shutil.rmtree(run_dir, ignore_errors=True)


ACTIONS: dict[str, Callable[[Path], object]] = {
    "run folder deleted": _delete,
    "run folder moved": lambda run_dir: run_dir.rename(run_dir.with_name("elsewhere")),
    "no descriptors left": lambda _: _limit(resource.RLIMIT_NOFILE, 3),
    "the console is gone": _close_console,
}
"""Name -> function that does the damage, given the run folder."""
