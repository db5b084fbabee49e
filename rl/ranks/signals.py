"""What ends a rank: signals, and the words for its last error."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, TracebackType

from rl.config.loading import escaped
from rl.config.schema import ConfigError, listed
from rl.ranks import heartbeat
from rl.ranks.dist import Dist

# ---- signals -------------------------------------------------------------------------------------
# Requests to stop: a signal sets a flag; the loop checks it between phases, saves and exits.

_UNHANDLED = "KILL STOP CONT TSTP TTIN TTOU CHLD URG WINCH PIPE XFSZ ILL TRAP ABRT BUS FPE SEGV SYS"
"""Signals that cannot be caught, that end no process by default (Python ignores PIPE and XFSZ), or
that report a crash of native code."""
_OTHERS = {heartbeat.STACKS_SIGNAL, *(getattr(signal, f"SIG{name}") for name in _UNHANDLED.split())}
STOP_SIGNALS = tuple(sorted(signal.valid_signals() - _OTHERS))
"""Signals that by default end the process and lose unsaved work: TERM, INT, HUP, QUIT
(Ctrl-\\), a batch system's notice (USR1, USR2, XCPU), timers, real-time signals."""
END_IF_REPEATED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals that end a process at once when sent twice. (The kernel repeats XCPU by itself.)"""
ECHO_S = 3.0
"""Ctrl-C reaches a rank twice within milliseconds, from the terminal and from the launcher; only a
later repetition is a request to end at once."""
_PR_SET_PDEATHSIG = 1

_received_s: dict[int, float] = {}
"""Stop signal that this process received -> time of the first one, `time.monotonic`."""


def name_of(signum: int) -> str:
    """'SIGTERM'; 'signal 35' for a real-time signal, most of which have no name."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def install() -> None:
    """Call this once, in the main thread. The first signal sets the flag; one of `END_IF_REPEATED`,
    sent again after `ECHO_S`, ends the process. If the launcher dies, Linux sends SIGTERM."""
    for signum in _ours():
        signal.signal(signum, _handle)
    die_with_parent()


@contextmanager
def collect_stop_signals() -> Iterator[list[int]]:
    """Within the block, stop signals only append to the yielded list. Use in the main thread."""
    received: list[int] = []
    before = {signum: signal.getsignal(signum) for signum in _ours()}
    if before.get(signal.SIGHUP) is signal.SIG_IGN:  # under nohup it stays ignored
        del before[signal.SIGHUP]
    for signum in before:
        signal.signal(signum, lambda number, _: received.append(number))
    try:
        yield received
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def at_once(save: Callable[[], object]) -> None:
    """Run `save` in a thread as soon as a stop signal comes, even if the main thread is in a call
    that does not return. It must not raise. Call this once, in the main thread, after `install`."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)  # Python writes signal numbers

    def listen() -> None:
        while os.read(reader, 1)[0] not in STOP_SIGNALS:
            pass
        save()

    threading.Thread(target=listen, daemon=True).start()


def stop_requested(dist: Dist) -> bool:
    """True on every rank once any rank was asked to stop. Collective: if each rank checked only its
    own flag, they would leave at different iterations and hang each other."""
    return dist.any(stop_received())


def stop_received() -> bool:
    """Whether THIS rank was asked to stop; call `stop_requested` next, to tell the other ranks."""
    return bool(_received_s)


def die_with_parent() -> None:
    """Have Linux send this process SIGTERM when its parent dies, however it dies."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # the parent died before `prctl` took effect
        os.kill(os.getpid(), signal.SIGTERM)


def _ours() -> list[int]:
    """The stop signals, without those whose handler was installed by C code."""
    return [signum for signum in STOP_SIGNALS if signal.getsignal(signum) is not None]


def _handle(signum: int, _: FrameType | None) -> None:
    is_new, now_s = signum not in _received_s, time.monotonic()
    since_s = now_s - _received_s.setdefault(signum, now_s)
    if is_new:
        # os.write: print is not re-entrant, and the signal may have interrupted one.
        hint = "; send it again to exit at once" if signum in END_IF_REPEATED else ""
        with suppress(OSError):
            os.write(2, f"\n{name_of(signum)}: will save and leave{hint}\n".encode())
    elif signum in END_IF_REPEATED and since_s > ECHO_S:
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)


# ---- error messages ------------------------------------------------------------------------------
# Prints a foreseen error as a sentence, and any other error as a traceback.

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
HOST_MEMORY = (
    "this machine has no memory left for the run; end other programs here, or lower "
    "prompts_per_iteration or world_size; the same command then resumes"
)
GPU_MEMORY = (
    "lower optimizer.max_tokens_per_micro_batch, or set gpu_gb to the GPU's memory and run --check "
    "to see what fits; the same command then resumes"
)
_PACKAGE = Path(__file__).resolve().parents[1]


def sentence(error: BaseException) -> str | None:
    """The message for the user; None if the user needs the traceback. Errors raised by a `raise`
    statement of this package have a message, and so have failures of a disk, folder, port or
    memory; asserts and errors of a library or a plugin have none."""
    if isinstance(error, OSError) and error.errno in REMEDIES:
        reason = remedy(error)
    elif isinstance(error, MemoryError):
        reason = HOST_MEMORY
    elif type(error).__name__ == "OutOfMemoryError":  # torch's; does not import torch
        reason = f"{escaped(str(error), MAX_SHOWN)}; {GPU_MEMORY}"
    elif not is_raised_here(error) or not str(error):
        return None
    elif isinstance(error, ConfigError):
        return f"this config cannot run:\n{listed(error.problems)}"
    else:
        reason = str(error).replace("\n", "\n  ")
    return f"this run cannot go on:\n  {reason}"


def is_raised_here(error: BaseException) -> bool:
    """Whether a `raise` statement of this package raised it."""
    frames = traceback.extract_tb(error.__traceback__)[-1:]
    return any(
        _PACKAGE in Path(frame.filename).resolve().parents
        and (frame.line or "").startswith("raise ")
        for frame in frames
    )


def remedy(error: OSError) -> str:
    """The path, the reason and, where one is known, what to do about it."""
    path = error.filename2 or error.filename  # after a failed rename: its target
    # Without a path, the system does not say what failed.
    is_no_write = not path and error.errno in (errno.EROFS, errno.EACCES)
    if is_no_write and not os.access(SHARED, os.W_OK):
        return f"{SHARED} cannot be written; mount it so that it can (docker run --shm-size 8g)"
    message = f"{path}: {error.strerror}" if path and error.strerror else str(error)
    fix = REMEDIES.get(error.errno or 0)
    return escaped(message, MAX_SHOWN) + (f"; {fix}" if fix else "")


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
