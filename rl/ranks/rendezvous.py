"""Sets up the rendezvous of a run's ranks, and the network interfaces that they listen on."""

from __future__ import annotations

import ipaddress
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from rl.ranks.node_watch import NodeWatch

if TYPE_CHECKING:
    from torch.distributed import TCPStore

INIT_METHOD = "RL_INIT_METHOD"
"""Environment variable: `init_method` of `init_process_group`; unset: torchrun's variables."""
JOIN_S = 600.0
"""How long a node waits for the others to start."""
_LINE_EVERY_S = 30.0

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
    store = _listen(family, host, port, say) if node == 0 else _join(host, port, say)
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
    watch = NodeWatch(store, node, num_nodes, num_local_ranks, say)
    try:
        yield environment, watch
    finally:
        watch.leave()


def _resolve(endpoint: str) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    """The first address of host:port, as `socket.connect` takes it."""
    try:
        parts = urlsplit(f"//{endpoint}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port or parts.netloc != endpoint or parts.username is not None:
        raise RendezvousError(f"--rdzv-endpoint {endpoint!r} is not host:port, or [address]:port")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise RendezvousError(
            f"--rdzv-endpoint {endpoint}: {host} cannot be resolved ({error})"
        ) from None
    return family, address


def _listen(family: socket.AddressFamily, host: str, port: int, say: Say) -> TCPStore:
    """Node 0's store, listening on this one address."""
    from torch.distributed import TCPStore

    try:
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        raise RendezvousError(
            f"node 0 cannot listen on {host}:{port} ({error.strerror}): --rdzv-endpoint "
            "must name an address of node 0 itself and a port that is free there"
        ) from None
    if ipaddress.ip_address(host).is_loopback:
        say(
            f"node 0 listens on {host}, which only this machine reaches: so that other machines "
            "reach it, give its network address to --rdzv-endpoint"
        )
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
    """Poll for `JOIN_S`, printing `line` every half minute. Raises RendezvousError(problem)."""
    began_s = line_s = time.monotonic()
    while not condition():
        now_s = time.monotonic()
        if now_s - began_s > JOIN_S:
            raise RendezvousError(problem)
        if now_s - line_s > _LINE_EVERY_S:
            say(f"{line} ({now_s - began_s:.0f} s)")
            line_s = now_s
        time.sleep(0.1)
