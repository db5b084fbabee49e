"""Prints a foreseen error as a sentence, and any other error as a traceback."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from rl.config.loading import escaped
from rl.config.schema import ConfigError, listed

MAX_SHOWN = 500
SHARED = "/dev/shm"  # nosec B108
"""Python's locks and NCCL's exchange between ranks are files there."""
REMEDIES = {
    errno.EACCES: "give this user access to it, or choose another path (a run's: base_exp_dir)",
    errno.EPERM: "give this user access to it, or choose another path (a run's: base_exp_dir)",
    errno.EROFS: "the disk is mounted read-only; name another folder (a run's: base_exp_dir)",
    errno.ENOSPC: "make room on that disk; the same command then resumes",
    errno.EDQUOT: "make room within this user's quota; the same command then resumes",
    errno.EFBIG: "the file has reached the largest size allowed here; raise it (ulimit -f)",
    errno.EIO: "the disk is failing; choose a folder on another one (base_exp_dir)",
    errno.ESTALE: "the network disk has lost this file; mount it again, and start the same command",
    errno.EISDIR: "a folder is where a file belongs; move it away, and start the same command",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EMFILE: "allow this process more open files (ulimit -n)",
    errno.ENFILE: "allow this machine more open files (fs.file-max)",
    errno.EADDRINUSE: "another process listens there; end it, or name another port",
    errno.EADDRNOTAVAIL: "no interface of this machine has that address; name one that does",
}
"""`errno` of an operating system error -> what to do about it."""
_MACHINE_ERRORS = {
    *("AcceleratorError", "DistBackendError", "DistNetworkError", "DistStoreError"),
    "JudgeEndedError",
}
_BY_MACHINE = ("CUDA error: ", "NCCL error", "closed by peer", "Connection reset by peer")
_BY_PROGRAM = (
    "out of memory",
    "device-side assert",
    "no kernel image",
    "invalid argument",
    "invalid configuration argument",
    "ncclInvalidUsage",
    "ncclInvalidArgument",
)
HOST_MEMORY = (
    "this machine has no memory left for the run; end other programs here, or lower "
    "prompts_per_iteration or world_size; the same command then resumes"
)
GPU_MEMORY = (
    "lower optimizer.max_tokens_per_micro_batch, or set gpu_gb to the GPU's memory and run --check "
    "to see what fits; the same command then resumes"
)
_leave = os._exit
_PACKAGE = Path(__file__).resolve().parents[1]


def sentence(error: BaseException) -> str | None:
    """The message for the user; None if the user needs the traceback. Errors raised by a `raise`
    statement of this package have a message, and so have failures of a disk, folder, port or
    memory; asserts and errors of a library or a plugin have none."""
    if isinstance(error, OSError) and error.errno in REMEDIES:
        return f"this run cannot go on:\n  {remedy(error)}"
    if isinstance(error, MemoryError):
        return f"this run cannot go on:\n  {HOST_MEMORY}"
    if type(error).__name__ == "OutOfMemoryError":  # torch's; does not import torch
        message = escaped(str(error), MAX_SHOWN)
        return f"this run cannot go on:\n  {message}; {GPU_MEMORY}"
    if not is_raised_here(error) or not str(error):
        return None
    if isinstance(error, ConfigError):
        return f"this config cannot run:\n{listed(error.problems)}"
    return "\n  ".join(["this run cannot go on:", *str(error).split("\n")])


def is_raised_here(error: BaseException) -> bool:
    """Whether a `raise` statement of this package raised it."""
    frames = traceback.extract_tb(error.__traceback__)[-1:]
    return any(
        _PACKAGE in Path(frame.filename).resolve().parents
        and (frame.line or "").startswith("raise ")
        for frame in frames
    )


def raise_on_exit() -> None:
    """From now on, `os._exit` in code that this package calls (a plugin, a library) raises
    SystemExit: the process would end without a word. Forked processes keep it."""
    process = os.getpid()

    def leave_or_raise(status: int) -> NoReturn:
        frames = traceback.walk_stack(sys._getframe(1))
        names = [str(frame.f_globals.get("__name__")) for frame, _ in frames]
        is_called_by_us = any(name.startswith("rl.") for name in names[1:])
        if is_called_by_us and not names[0].startswith("rl.") and os.getpid() == process:
            raise SystemExit(f"os._exit({status}), which ends a process without a word")
        _leave(status)

    os._exit = leave_or_raise


def remedy(error: OSError) -> str:
    """The path, the reason and, where one is known, what to do about it."""
    path = error.filename2 or error.filename  # after a failed rename: its target
    if not path:  # the system does not say what failed
        if error.errno == errno.ENOENT and not _has_working_folder():
            return "the folder in which this command was started is gone; change into another"
        if error.errno in (errno.EROFS, errno.EACCES) and not os.access(SHARED, os.W_OK):
            return f"{SHARED} cannot be written; mount it so that it can (docker run --shm-size 8g)"
    message = f"{path}: {error.strerror}" if path and error.strerror else str(error)
    fix = REMEDIES.get(error.errno or 0)
    return escaped(message, MAX_SHOWN) + (f"; {fix}" if fix else "")


def _has_working_folder() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def is_machine_error(error: BaseException) -> bool:
    """Whether a device, a connection (CUDA, NCCL, gloo) or a started judge failed, so that a retry
    may help; False for a lack of memory, and for errors that the program itself caused."""
    text = str(error)
    names = {cls.__name__ for cls in type(error).__mro__}
    is_known = any(part in text for part in _BY_MACHINE) or bool(names & _MACHINE_ERRORS)
    return is_known and not any(part in text for part in _BY_PROGRAM)


def is_lost_device(error: BaseException) -> bool:
    """Whether this process can no longer use its GPU at all."""
    return any(cls.__name__ == "AcceleratorError" for cls in type(error).__mro__)


def excepthook(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    text = sentence(error)
    if text is None:
        sys.__excepthook__(kind, error, trace)
    else:
        print(text, file=sys.stderr)
