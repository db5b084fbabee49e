"""The program of the ranks in the launcher's tests; TEST_MODE selects its behaviour."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from rl.judge.http import resolve_api_base
from rl.ranks import heartbeat, signals
from rl.ranks.dist import Dist

RANK = int(os.environ["RANK"])
LAST = int(os.environ["WORLD_SIZE"]) == RANK + 1
FOLDER = Path(os.environ["TEST_FOLDER"])
MODE = os.environ["TEST_MODE"]


def fail_deep_inside() -> None:
    raise ValueError(f"boom on rank {RANK}")


def note(name: str, text: str) -> bool:
    part = FOLDER / f"{name}_{RANK}.part"
    part.write_text(text)
    part.rename(FOLDER / f"{name}_{RANK}")
    return True


print(f"rank {RANK} says hello", flush=True)
if MODE == "done":
    note("argv", " ".join(sys.argv[1:]))
    note("threads", os.environ["OMP_NUM_THREADS"])
    dist = Dist.from_env()
    note("met", str(dist.gather(f"{FOLDER.name} {RANK}")))
    dist.close()
elif MODE == "listen":
    dist = Dist.from_env()
    dist.gather(None)
    note("interfaces", f"{os.environ['GLOO_SOCKET_IFNAME']} {os.environ['NCCL_SOCKET_IFNAME']}")
    while not (FOLDER / "seen").exists():
        time.sleep(0.05)
    dist.close()
elif MODE == "raise" and LAST:
    while not (FOLDER / "waiting_0").exists():
        time.sleep(0.05)
    fail_deep_inside()
elif MODE == "mistake" and LAST:
    resolve_api_base("/no/such/file")
elif MODE.startswith("aborts at the end"):
    libc = ctypes.CDLL(None)
    assert libc.__cxa_atexit(libc.abort, None, None) == 0  # as a C++ library's destructor may
    threading.Thread(target=lambda: (time.sleep(0.5), note("thread", "joined"))).start()
    atexit.register(note, "handler", "called")
    sys.stdout.write("the last word")
    sys.exit(int(MODE.split()[-1]))
elif MODE == "killed" and LAST:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
    note("child", str(child.pid))
    os.kill(os.getpid(), signal.SIGKILL)
elif MODE == "leaves" and LAST:
    os._exit(0)
elif MODE == "graceful":
    received: list[int] = []
    for signum in signals.STOP_SIGNALS:
        signal.signal(signum, lambda number, _: received.append(number))
    note("ready", str(os.getpid()))
    while not received:
        time.sleep(0.02)
    time.sleep(0.5)  # as if it saved a checkpoint
    note("saved", signals.name_of(received[0]))
    sys.exit(0)
elif MODE == "frozen":
    signals.install()
    signals.at_once(lambda: note("saved", "at once"))
    with heartbeat.phase("generate"):
        note("began", str(time.monotonic()))
        if LAST:  # stops again after SIGCONT, as a debugger would
            signal.signal(signal.SIGCONT, lambda *_: os.kill(os.getpid(), signal.SIGSTOP))
        os.kill(os.getpid(), signal.SIGSTOP)
        while not signals.stop_received():
            exec("time.sleep(0.02)\n" * 10)  # on ten lines, so that its stack changes
    note("left", "")
if MODE in ("raise", "mistake", "killed", "leaves"):
    note("waiting", str(os.getpid()))
    time.sleep(120)
