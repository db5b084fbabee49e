"""Starts and watches the ranks of a node: rendezvous, hangs, lost nodes, and how ranks end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rl.ranks import heartbeat
from rl.ranks.dist import INIT_METHOD
from rl.ranks.heartbeat import Beat
from rl.ranks.signals import name_of

if TYPE_CHECKING:
    from torch.distributed import TCPStore

# ---- hang watch ----------------------------------------------------------------------------------
# Finds ranks that hang, from their heartbeats and the kernel's state of their processes.

LOG_AFTER_S = 45.0
"""A rank that has made no progress for this long is logged, once."""
WATCHED_ELSEWHERE = "judge_wait"
"""A phase in which no rank counts as hanging: the judge's client has its own time limits."""

Kind = Literal["moves", "judge", "waits", "stuck", "silent", "stopped"]


@dataclass(frozen=True)
class RankState:
    kind: Kind
    idle_s: float
    """Time without progress."""
    beat: Beat


class HangWatch:
    def __init__(
        self,
        beats: Mapping[int, Path],
        pids: Mapping[int, int],
        limit_s: float,
        is_one_node: bool,
        say: Callable[[str], None],
    ) -> None:
        """`beats`, `pids`: by rank. `limit_s`: how long a rank may hang."""
        self._beats, self._pids, self._say = dict(beats), dict(pids), say
        self._limit_s, self._is_one_node = limit_s, is_one_node
        self._log_after_s = min(LOG_AFTER_S, limit_s / 2)
        self._looked_s = self._awake_s = time.monotonic()
        self._logged: set[int] = set()
        self.hung: dict[int, RankState] = {}
        """The ranks that hung at the last `look`."""

    def look(self) -> bool:
        """Log ranks that hang; returns whether one has hung beyond the limit."""
        now_s = time.monotonic()
        if now_s - self._looked_s > heartbeat.LONG_GAP_S:  # e.g. Ctrl-Z stopped launcher and ranks
            self._awake_s = now_s
        self._looked_s = now_s
        looks = {rank: self._rank_state(rank, now_s) for rank in self._beats}
        states = {rank: state for rank, state in looks.items() if state is not None}
        self.hung = self._hung_of(states)
        for rank, state in self.hung.items():
            if state.idle_s >= self._log_after_s and rank not in self._logged:
                self._logged.add(rank)
                self._say(self._sentence(rank, states, now_s))
        self._logged &= self.hung.keys()
        return any(s.idle_s >= self._limit_s and self._may_end(s) for s in self.hung.values())

    def _rank_state(self, rank: int, now_s: float) -> RankState | None:
        """None: the rank has written no heartbeat yet, or is gone."""
        state, beat = _process_state(self._pids[rank]), heartbeat.read(self._beats[rank])
        if beat is None or state in ("", "Z", "X"):
            return None
        silent_s = now_s - max(beat.at_s, self._awake_s)
        idle_s = beat.at_s - max(beat.moved_s, self._awake_s)
        kind: Kind
        if silent_s >= self._log_after_s:
            kind, idle_s = "stopped" if state in ("T", "t") else "silent", silent_s
        elif beat.phase.endswith(WATCHED_ELSEWHERE):
            kind = "judge"
        elif idle_s < self._log_after_s:
            kind = "moves"
        else:
            kind = "waits" if beat.waits_for_ranks else "stuck"
        return RankState(kind, idle_s, beat)

    def _hung_of(self, states: Mapping[int, RankState]) -> dict[int, RankState]:
        """The ranks that hang. Of several stuck ranks, only the first to get stuck counts: on a
        GPU, the others may wait for it inside any call."""
        if dead := {rank: s for rank, s in states.items() if s.kind in ("silent", "stopped")}:
            return dead
        by_move = sorted(states.items(), key=lambda item: item[1].beat.moved_s)
        if stuck := [(rank, state) for rank, state in by_move if state.kind == "stuck"]:
            return dict(stuck[:1])
        all_wait = all(state.kind == "waits" for state in states.values())
        return dict(by_move[-1:]) if all_wait else {}

    def _may_end(self, state: RankState) -> bool:
        """Whether a hang may end the run. Waiting ranks of one of several nodes may not: a rank of
        another node, not watched here, may be waiting for the judge."""
        return state.kind != "waits" or self._is_one_node

    def _sentence(self, rank: int, states: Mapping[int, RankState], now_s: float) -> str:
        state, beat = states[rank], states[rank].beat
        text = (
            f"rank {rank} has made no progress for {state.idle_s:.0f} s, in phase {beat.phase} "
            f"for {now_s - beat.phase_since_s:.0f} s ({beat.where}): "
        )
        causes = {
            "waits": "all ranks here wait for other ranks",
            "stopped": f"its process is stopped (kill -CONT {self._pids[rank]} resumes it)",
            "silent": "Python does not run in it: a call holds the GIL, or a disk is dead",
        }
        text += causes.get(state.kind, "a deadlock, or one long call")
        if state.kind != "waits":
            waiting = [r for r, s in states.items() if r != rank and s.beat.waits_for_ranks]
            text += "".join(f"; rank {other} waits for it" for other in waiting)
        if self._may_end(state):
            text += f"; at {self._limit_s:g} s the run ends (hang_limit_s)"
        return text


def _process_state(pid: int) -> str:
    """The kernel's letter: 'T' stopped, 'Z' dead; '' if the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    except OSError:
        return ""


# ---- node watch ----------------------------------------------------------------------------------
# Watches whether the other nodes of a run are alive, and reports why they ended.

BEAT_S = 2.0
LOST_S = 60.0
"""A node silent for this long counts as lost. TCP survives interruptions of half this time."""
NODE_LEAVE_S = 60.0
"""How long node 0 keeps the store for nodes that end after it."""


class NodeWatch:
    """One node's view of the others. Ranks do not notice a cut cable: they wait in a collective for
    hours. So each launcher increments a counter in the rendezvous store; node 0 reads all other
    counters, and the others read node 0's. Only a separate thread uses the store: calls to the
    store block while the network is down."""

    def __init__(
        self, store: TCPStore, node: int, num_nodes: int, say: Callable[[str], Any]
    ) -> None:
        """`say` prints a line."""
        self.ending = ""
        """Why this node's ranks failed, to tell the other nodes; '' if they did not."""
        self._store, self._node, self._say = store, node, say
        self._others = [other for other in range(num_nodes) if other != node]
        self._beats = dict.fromkeys(self._others if node == 0 else [0], -1)
        self._alive_s = dict.fromkeys(self._beats, time.monotonic())
        """Node -> when its counter last rose; nodes that have left are removed."""
        self._lost: set[int] = set()
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def lost(self) -> str:
        """A message naming a node silent for `LOST_S` or longer, or ''. Call it every second."""
        for node, alive_s in self._alive_s.copy().items():
            silent_s = time.monotonic() - alive_s
            if silent_s >= LOST_S:
                self._lost.add(node)
                return f"node {node} has been unreachable for {silent_s:.0f} s"
        return ""

    def leave(self) -> None:
        """Call when this node's ranks have ended: tells other nodes why. Node 0 keeps the store."""
        self._leaving.set()
        self._thread.join(BEAT_S if 0 in self._lost else NODE_LEAVE_S + BEAT_S)

    def _run(self) -> None:
        with suppress(RuntimeError):  # node 0 has gone
            while not self._leaving.wait(BEAT_S):
                self._store.add(f"beat/{self._node}", 1)
                for node, before in self._beats.items():
                    beats = self._store.add(f"beat/{node}", 0)
                    if self._store.check([f"ending/{node}"]):
                        self._alive_s.pop(node, None)
                    elif beats != before or node == 0:
                        self._beats[node], self._alive_s[node] = beats, time.monotonic()
            self._store.set(f"ending/{self._node}", self.ending)
            self._log_endings()

    def _log_endings(self) -> None:
        """Log why others failed. Node 0 waits for nodes not lost; a failed node waits 2 beats."""
        max_wait_s = NODE_LEAVE_S if self._node == 0 else 2 * BEAT_S if self.ending else 0.0
        deadline = time.monotonic() + max_wait_s
        missing = [node for node in self._others if node not in self._lost]
        while missing and time.monotonic() <= deadline:
            for node in [n for n in missing if self._store.check([f"ending/{n}"])]:
                missing.remove(node)
                if ending := self._store.get(f"ending/{node}").decode():
                    self._say(f"from node {node}: {ending}")
            time.sleep(0.1)


# ---- rendezvous ----------------------------------------------------------------------------------
# Sets up the rendezvous of a run's ranks, and the network interfaces that they listen on.

JOIN_S = 600.0
"""How long a node waits for the others to start."""

Environment = dict[str, str]
Say = Callable[[str], Any]


class RendezvousError(Exception):
    """The nodes did not find each other; the message names the endpoint and the remedy."""


def on_one_node(folder: Path) -> Environment:
    """Environment for ranks that meet through a file in `folder`, which must be private to this
    user, and listen on the loopback interface only. Overrides GLOO_SOCKET_IFNAME and
    NCCL_SOCKET_IFNAME, which clusters set for several nodes."""
    loopback = interface_of("127.0.0.1")
    return {
        INIT_METHOD: (folder / "rendezvous").absolute().as_uri(),
        "GLOO_SOCKET_IFNAME": loopback,
        "NCCL_SOCKET_IFNAME": f"={loopback}",
    }


def interface_of(address: str) -> str:
    """Name of the interface that has this address. Raises RendezvousError when none has."""
    import psutil

    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in entries):
            return str(name)
    raise RendezvousError(f"{address} is the address of none of this machine's interfaces")


@contextmanager
def on_several_nodes(
    endpoint: str, node: int, num_nodes: int, num_local_ranks: int, say: Say
) -> Iterator[tuple[Environment, NodeWatch]]:
    """(environment for this node's ranks, watch over the other nodes). Entering waits until all
    nodes have joined; leaving waits until they have ended. The nodes meet at a TCPStore in node 0's
    launcher, on one interface; torch's own agent would listen on every interface.

    `endpoint`: host:port of node 0, as given on every node. `say` prints a line during waits.
    GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME stay as the user set them. Raises RendezvousError.
    """
    family, address = _resolve(endpoint)
    host, port = str(address[0]), int(address[1])
    store = _listen(family, host, port) if node == 0 else _join(host, port, say)
    _check_in(store, node, num_nodes, num_local_ranks, say)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        interface = interface_of(str(probe.getsockname()[0]))  # of the route to node 0
    environment = {
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # else rank 0 hosts a store on every interface
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", interface),
        "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", f"={interface}"),
    }
    watch = NodeWatch(store, node, num_nodes, say)
    try:
        yield environment, watch
    finally:
        watch.leave()


def _resolve(endpoint: str) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    """The first address of host:port, as `socket.connect` takes it."""
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise RendezvousError(f"--rdzv-endpoint {endpoint!r} is not host:port, or [address]:port")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise RendezvousError(
            f"--rdzv-endpoint {endpoint}: {host} cannot be resolved ({error})"
        ) from None
    return found[0][0], found[0][4]


def _listen(family: socket.AddressFamily, host: str, port: int) -> TCPStore:
    """Node 0's store, listening on this one address."""
    from torch.distributed import TCPStore

    try:
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        raise RendezvousError(
            f"node 0 cannot listen on {host}:{port} ({error.strerror}): --rdzv-endpoint "
            "must name an address of node 0 itself and a port that is free there"
        ) from None
    descriptor = listener.detach()
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)


def _join(host: str, port: int, say: Say) -> TCPStore:
    from torch.distributed import TCPStore

    def answers() -> bool:
        with suppress(OSError):
            socket.create_connection((host, port), timeout=5).close()
            return True
        return False

    _wait_until(
        answers,
        f"waiting for node 0 at {host}:{port}",
        f"nobody answers at --rdzv-endpoint {host}:{port} for {JOIN_S:.0f} s: start the same "
        "command with --node-rank 0 there, and open the port in the firewall",
        say,
    )
    return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=60))


def _check_in(store: TCPStore, node: int, num_nodes: int, num_local_ranks: int, say: Say) -> None:
    """Wait for all other nodes; check that all were started for the same nodes and ranks."""
    plan = f"{num_nodes} nodes of {num_local_ranks} ranks"
    other_plan = store.compare_set("plan", "", plan).decode()
    if other_plan != plan:
        raise RendezvousError(f"this node was started for {plan}, another one for {other_plan}")
    if store.add(f"node/{node}", 1) > 1:
        raise RendezvousError(f"another node was started with --node-rank {node} too")
    store.add("joined", 1)
    _wait_until(
        lambda: store.add("joined", 0) >= num_nodes,
        f"waiting for all of {plan}",
        f"fewer than {num_nodes} nodes came within {JOIN_S:.0f} s: start the same command on each, "
        "with its own --node-rank",
        say,
    )


def _wait_until(condition: Callable[[], bool], line: str, problem: str, say: Say) -> None:
    """Print `line`, and poll for `JOIN_S`. Raises RendezvousError(problem)."""
    say(line)
    end_s = time.monotonic() + JOIN_S
    while not condition():
        if time.monotonic() > end_s:
            raise RendezvousError(problem)
        time.sleep(0.1)


# ---- endings -------------------------------------------------------------------------------------
# Ends a node's ranks: on request, because one failed, or because one hangs.

GRACE_S = 300
"""How long ranks may take to save and exit before they are killed."""
ALONE_GRACE_S = 90
"""The same if a rank hangs or a node is lost: ranks that wait for it can save but never exit."""
STOPPED_GRACE_S = 5
"""How long a rank may stay stopped after SIGCONT before it is killed."""
KILL_S = 30
HUNG_CODE = 124
"""The launcher's exit code after a hang; `timeout` uses the same."""
FINISHED_CODE = 86
"""Exit code of a rank that has finished its script. A rank with exit code 0 has not: a library or a
plugin called `sys.exit` or `os._exit` in the middle of the run."""
PEERS_TERM_S = 30
"""How long after a failure the other ranks may take to end by SIGTERM before SIGKILL."""


@dataclass(frozen=True)
class Ending:
    """How one start of the ranks ended."""

    code: int
    what: str
    """'rank 1 was killed by SIGKILL'; '' if nothing failed."""
    lines: tuple[str, ...] = ()


def of_failure(
    first: Container[int], codes: Mapping[int, int], notes: Path, log_dir: Path
) -> Ending:
    """Names the rank that failed first, and the cause. `codes`: exit codes of the failed ranks, by
    rank; negative: the signal that killed it. `first`: those that ended before the launcher asked
    the others to end."""
    by_rank = {rank: _note(notes / f"rank_{rank}.json") for rank in {*codes, 0}}

    def order(rank: int) -> tuple[bool, bool, int]:
        # Ranks without a note of their end sort first. Ranks ended by SIGTERM were asked to end;
        # so were ranks that ignored it and were then killed.
        note, code = by_rank[rank], codes[rank]
        asked = code == -signal.SIGTERM or (code == -signal.SIGKILL and rank not in first)
        return asked, note.get("only_heard", False), note.get("ended_ns", 0)

    rank = min(codes, key=order)
    code, note = codes[rank], by_rank[rank]
    if code < 0:
        what = f"rank {rank} was killed by {name_of(-code)}"
    elif code > 0:
        what = f"rank {rank} failed: exit code {code}"
    else:
        what = f"rank {rank} failed: a library or a plugin ended it (sys.exit, os._exit) too early"
        code = 1
    lines, reason = [f"{what}; logs: {log_dir}"], note.get("reason", "")
    if rank != 0 and reason != by_rank[0].get("reason"):  # rank 0 has printed its reason
        lines.append(reason)
    return Ending(code if code > 0 else 128 - code, what, tuple(lines))


class Ranks:
    """The processes of this node's ranks, each the leader of a process group."""

    def __init__(
        self,
        processes: Mapping[int, subprocess.Popen[bytes]],
        watch: HangWatch,
        say: Callable[[str], None],
    ) -> None:
        """`processes`: by rank. `say` prints a line."""
        self._processes, self._watch, self._say = processes, watch, say

    def all_done(self) -> bool:
        return all(process.poll() == FINISHED_CODE for process in self._processes.values())

    def failures(self) -> dict[int, int]:
        """Exit codes of the ranks that have ended before their script so far."""
        codes = {rank: process.poll() for rank, process in self._processes.items()}
        return {r: code for r, code in codes.items() if code not in (None, FINISHED_CODE)}

    def end_hung(self) -> Ending:
        """Make all ranks write their stacks and save; kill those that do not exit."""
        hung = ", ".join(f"rank {rank}" for rank in self._watch.hung)
        self._say(
            f"{hung} hung for too long (hang_limit_s): the stacks of all ranks go to their logs, "
            "finished work is saved, and the run ends"
        )
        for process in self._processes.values():
            process.send_signal(heartbeat.STACKS_SIGNAL)
        self.leave([signal.SIGTERM], ALONE_GRACE_S)
        return Ending(HUNG_CODE, f"{hung} hung")

    def end_alone(self, lost: str) -> Ending:
        """Make the ranks here save; kill those that do not exit. `lost`: the unreachable node."""
        self._say(
            f"{lost} (machine, launcher or network): the ranks here save and end; the same command "
            "on every node resumes the run"
        )
        self.leave([signal.SIGTERM], ALONE_GRACE_S)
        return Ending(1, lost)

    def leave_as_asked(self, signums: list[int]) -> Ending:
        """Pass on the signals that asked the launcher to stop; `signums` may grow meanwhile."""
        self.leave(signums)
        reason = f"stopped by {name_of(signums[0])}; the same command resumes the run from its "
        return Ending(128 + signums[0], "", (reason + "last checkpoint",))

    def leave(self, signums: list[int], grace_s: float = GRACE_S) -> None:
        """Send the ranks `signums`, which may grow, and wake stopped ranks. Wait until all have
        exited. Kill ranks that stay stopped after `STOPPED_GRACE_S`, because others may wait for
        them, and the rest after `grace_s`. (Each saves in a thread when the signal comes.)"""
        ends_s, num_sent = time.monotonic() + grace_s, 0
        stopped_s: dict[int, float] = {}
        while living := {r: each for r, each in self._processes.items() if each.poll() is None}:
            if num_sent < len(signums):
                pids = [process.pid for process in living.values()]
                signal_groups(pids, *signums[num_sent:], signal.SIGCONT)
                num_sent = len(signums)
            now_s = time.monotonic()
            if now_s > ends_s:
                return self._kill(living, "they did not exit in time after being asked")
            stopped = [r for r, each in living.items() if _process_state(each.pid) in ("T", "t")]
            stopped_s = {rank: stopped_s.get(rank, now_s) for rank in stopped}
            stuck = [r for r, since_s in stopped_s.items() if now_s - since_s > STOPPED_GRACE_S]
            if stuck:
                why = "they are stopped, and SIGCONT does not continue them"
                self._kill({rank: living[rank] for rank in stuck}, why)
                ends_s = min(ends_s, now_s + ALONE_GRACE_S)
            time.sleep(0.2)

    def _kill(self, living: Mapping[int, subprocess.Popen[bytes]], why: str) -> None:
        self._say(f"killed, as {why}: {', '.join(f'rank {rank}' for rank in living)}")
        signal_groups([process.pid for process in living.values()], signal.SIGKILL)
        for process in living.values():
            with suppress(subprocess.TimeoutExpired):  # e.g. one waits for a dead disk
                process.wait(KILL_S)


def signal_groups(groups: Iterable[int], *signums: int) -> None:
    """Send the signals to each process group that still has a process."""
    for group in groups:
        for signum in signums:
            with suppress(ProcessLookupError):
                os.killpg(group, signum)


def _note(file: Path) -> dict[str, Any]:
    """The note that `worker.py` wrote about a rank; {} if it wrote none."""
    with suppress(OSError, ValueError):
        return dict(json.loads(file.read_bytes()))
    return {}
