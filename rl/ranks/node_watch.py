"""Watches whether the other nodes of a run are alive, and reports why they ended."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import TCPStore

BEAT_S = 2.0
LOST_S = 60.0
"""A node silent for this long counts as lost. TCP survives interruptions of half this time."""
STOPPED_S = 10.0
"""A longer gap between calls of `lost` means that this launcher was stopped; silence is reset."""
LEAVE_S = 60.0
"""How long node 0 keeps the store for nodes that end after it."""


class NodeWatch:
    """One node's view of the others. Ranks do not notice a cut cable: they wait in a collective for
    hours. So each launcher increments a counter in the rendezvous store; node 0 reads all other
    counters, and the others read node 0's. Only a separate thread uses the store: calls to the
    store block while the network is down."""

    def __init__(
        self, store: TCPStore, node: int, num_nodes: int, num_ranks: int, say: Callable[[str], Any]
    ) -> None:
        """`num_ranks`: per node. `say` prints a line."""
        self.ending = ""
        """Why this node's ranks failed, to tell the other nodes; '' if they did not."""
        self._store, self._node, self._num_ranks, self._say = store, node, num_ranks, say
        self._others = [other for other in range(num_nodes) if other != node]
        self._beats = dict.fromkeys(self._others if node == 0 else [0], -1)
        self._alive_s = dict.fromkeys(self._beats, time.monotonic())
        """Node -> when its counter last rose; nodes that have left are removed."""
        self._looked_s = time.monotonic()
        self._lost: set[int] = set()
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def lost(self) -> str:
        """A message naming a node silent for `LOST_S` or longer, or ''. Call it every second."""
        now_s = time.monotonic()
        if now_s - self._looked_s > STOPPED_S:
            self._alive_s = dict.fromkeys(self._alive_s.copy(), now_s)
        self._looked_s = now_s
        for node, alive_s in self._alive_s.copy().items():
            if now_s - alive_s >= LOST_S:
                self._lost.add(node)
                return f"{self._name(node)} has been unreachable for {now_s - alive_s:.0f} s"
        return ""

    def leave(self) -> None:
        """Call when this node's ranks have ended: tells other nodes why. Node 0 keeps the store."""
        self._leaving.set()
        self._thread.join(BEAT_S if 0 in self._lost else LEAVE_S + BEAT_S)

    def _name(self, node: int) -> str:
        first = node * self._num_ranks
        last = first + self._num_ranks - 1
        ranks = f"rank {first}" if first == last else f"ranks {first} to {last}"
        return f"node {node} ({ranks})"

    def _run(self) -> None:
        with suppress(RuntimeError):  # node 0 has gone
            while not self._leaving.wait(BEAT_S):
                self._beat()
            self._store.set(f"ending/{self._node}", self.ending)
            self._log_endings()

    def _beat(self) -> None:
        self._store.add(f"beat/{self._node}", 1)
        for node, before in self._beats.items():
            beats = self._store.add(f"beat/{node}", 0)
            if self._store.check([f"ending/{node}"]):
                self._alive_s.pop(node, None)
            elif beats != before or node == 0:
                self._beats[node], self._alive_s[node] = beats, time.monotonic()

    def _log_endings(self) -> None:
        """Log why others failed. Node 0 waits for nodes not lost; a failed node waits 2 beats."""
        max_wait_s = LEAVE_S if self._node == 0 else 2 * BEAT_S if self.ending else 0.0
        deadline = time.monotonic() + max_wait_s
        missing = [node for node in self._others if node not in self._lost]
        while missing and time.monotonic() <= deadline:
            for node in [n for n in missing if self._store.check([f"ending/{n}"])]:
                missing.remove(node)
                if ending := self._store.get(f"ending/{node}").decode():
                    self._say(f"from {self._name(node)}: {ending}")
            time.sleep(0.1)
