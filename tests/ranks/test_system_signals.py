"""Real signals to real processes: the first lets a rank save, a second one ends it at once."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import time

import pytest
from tiny_ranks import run_ranks, start

from rl.ranks import heartbeat, signals
from rl.ranks.dist import Dist

RANK = """
    import sys, time
    from rl.ranks import signals
    from rl.ranks.dist import Dist
    signals.ECHO_S = float(sys.argv[1])
    signals.install()
    dist = Dist()
    print(signals.stop_requested(dist), flush=True)
    deadline = time.monotonic() + 120
    while not signals.stop_requested(dist) and time.monotonic() < deadline:
        time.sleep(0.01)
    print("saving", flush=True)
    time.sleep(float(sys.argv[2]))
    print("saved", flush=True)
"""


def start_rank(echo_s: float, save_s: float) -> subprocess.Popen[str]:
    process = start(RANK, str(echo_s), str(save_s))
    assert process.stdout.readline() == "False\n"
    return process


CRASHES = {
    getattr(signal, f"SIG{name}") for name in ["ILL", "TRAP", "ABRT", "BUS", "FPE", "SEGV", "SYS"]
}
IGNORED_BY_PYTHON = {signal.SIGPIPE, signal.SIGXFSZ}


def ends_by_default(signum: int) -> bool:
    """Whether the signal ends a process that has no handler for it."""
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


@pytest.mark.slow
def test_every_signal_that_ends_a_process_lets_a_run_save_except_crashes():
    pausing = {signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}
    ending = set(filter(ends_by_default, signal.valid_signals() - pausing - {signal.SIGKILL}))
    others = CRASHES | IGNORED_BY_PYTHON | {heartbeat.STACKS_SIGNAL}
    assert set(signals.STOP_SIGNALS) == ending - others


@pytest.mark.parametrize(
    ("echo_s", "save_s", "first", "second", "ended", "printed"),
    [
        (0, 0.2, signal.SIGTERM, 0, (0, "saved\n"), ""),
        (0, 0.2, signal.SIGHUP, 0, (0, "saved\n"), ""),
        (0, 0.2, signal.SIGUSR1, signal.SIGUSR1, (0, "saved\n"), ""),
        (0, 0.2, signal.SIGXCPU, signal.SIGXCPU, (0, "saved\n"), ""),  # the kernel repeats it
        (5, 0.3, signal.SIGINT, signal.SIGINT, (0, "saved\n"), ""),  # Ctrl-C within seconds
        # A batch system sends SIGTERM some time after its notice.
        (0, 0.3, signal.SIGUSR1, signal.SIGTERM, (0, "saved\n"), "send it again to exit at once"),
        (0.05, 60, signal.SIGTERM, signal.SIGTERM, (-signal.SIGTERM, ""), ""),
    ],
)
def test_a_signal_lets_the_run_save_and_a_second_one_may_end_it(
    echo_s, save_s, first, second, ended, printed
):
    process = start_rank(echo_s, save_s)
    process.send_signal(first)
    assert process.stdout.readline() == "saving\n"
    time.sleep(2 * echo_s if save_s == 60 else 0)
    process.send_signal(second)  # 0: none
    stdout, stderr = process.communicate(timeout=120)
    assert (process.returncode, stdout) == ended
    _, answer, rest = stderr.partition(f"{(second or first).name}: will save and leave")
    assert answer and printed in rest


def test_a_hanging_main_thread_does_not_delay_the_save_after_a_signal():
    process = start(
        """
        import ctypes
        from rl.ranks import signals
        signals.install()
        signals.at_once(lambda: not print("saved", flush=True))
        lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
        lock(mutex)
        print("hangs", flush=True)
        lock(mutex)  # blocks whatever signal arrives, like a collective without its peer
        """
    )
    assert process.stdout.readline() == "hangs\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "saved\n"
    process.kill()
    process.communicate(timeout=120)


def test_a_rank_whose_launcher_is_killed_saves_and_exits():
    launcher = start(
        """
        import subprocess, sys, time
        rank = subprocess.Popen([sys.executable, "-c", sys.argv[1], "5", "0"])
        print("launched", flush=True)
        time.sleep(60)
        """,
        "\n".join(line[4:] for line in RANK.splitlines()),
    )
    assert {launcher.stdout.readline(), launcher.stdout.readline()} == {"launched\n", "False\n"}
    launcher.kill()
    stdout, _ = launcher.communicate(timeout=120)  # the rank keeps the pipe open until it ends
    assert stdout == "saving\nsaved\n"


def stop_one_of_two() -> tuple[bool, bool]:
    signals.install()
    dist = Dist.from_env("cpu")
    before = signals.stop_requested(dist)
    if dist.rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    requested = (before, signals.stop_requested(dist))
    dist.close()
    return requested


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_all():
    assert run_ranks(stop_one_of_two, 2) == [(False, True), (False, True)]
