"""The render pool's actors on a Ray cluster; the only file that imports Ray."""

from __future__ import annotations

import atexit
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from rl.api.metric import Metric
from rl.api.plugin import Resources
from rl.api.renderer import Renderer
from rl.api.types import RenderJob, Sample
from rl.config.schema import RAY_MISSING, RenderPoolConfig
from rl.judge.server import NEEDED_SECRETS
from rl.pool.dispatch import Dispatcher, Reference, WorkerLostError
from rl.pool.pool_worker import Worker, digest_of, facts_of_code, facts_of_model, spec_of
from rl.printing import environment_without, is_secret_name
from rl.ranks.dist import resolve_device
from rl.ranks.signals import STOP_SIGNALS

if TYPE_CHECKING:
    from rl.ranks.dist import Dist

LEAVE_S = 60.0
"""How long rank 0 keeps a cluster that it started for ranks that still draw."""
RAYLET_S = 60
"""How long Ray's process of a machine, the raylet, goes on without the head; Ray's default."""
NAMESPACE = "vlm_edit_rl"
REGISTRY = "/registry"
INHERITED = re.compile(
    r"(HF|TORCH|CUBLAS|CUDNN|NVIDIA|ATEN|ONEDNN|OMP|MKL|DIFFUSERS|TRANSFORMERS)_.*(?<!TOKEN)"
)
"""Environment variables that change how a model is found or computed; workers get the rank's."""

_raylets: list[psutil.Process] = []
"""This machine's, and a head that this process started, while it is connected."""


class Registry:
    """Keeps the first batch that the pool drew, for workers that join later and other ranks."""

    def __init__(self) -> None:
        self._reference: tuple[Any, Sequence[str], Mapping[str, str]] | None = None

    def agree(self, message: Any, digests: Sequence[str], facts: Mapping[str, str]) -> Any:
        """The reference; `message` becomes it if there is none (None: it asks only)."""
        if self._reference is None and message is not None:
            self._reference = (message, digests, facts)
        return self._reference


@dataclass(eq=False)
class Call:
    """A call of a worker's method."""

    ref: Any
    worker: str
    handle: Any


class RayWorkers:
    """The actors of one pool (`dispatch.Workers`)."""

    LOADING = "waits for a GPU or loads the renderer"
    OF_A_RUN = "belongs to a run, and ends with it"

    def __init__(
        self, config: RenderPoolConfig, spec: Mapping[str, Any], detached: bool = False
    ) -> None:
        """`detached`: they outlive this process (`rl pool start`). Call `connect` first."""
        self._ray = _ray()
        self._config = config
        self._spec = {**spec, "detached": detached}
        self.name = config.name or f"pool-{digest_of(spec)}"
        self._handles: dict[str, Any] = {}
        env = {
            key: value
            for key, value in os.environ.items()
            if INHERITED.fullmatch(key) and not is_secret_name(key)
        }
        self._options: dict[str, Any] = {
            "namespace": NAMESPACE,
            "get_if_exists": True,
            "lifetime": "detached" if detached else None,
            "max_restarts": -1,
            "runtime_env": {"env_vars": env},
        }
        self._registry: Any = None

    def names(self) -> list[str]:
        """All workers that should exist; missing ones are started, and wait in Ray's queue until
        there is a place for them."""
        for number in range(self._wanted()):
            self._handle(f"{self.name}/{number}")
        return list(self._handles)  # none that was started is dropped

    def _handle(self, name: str) -> Any:
        if name not in self._handles:
            self._handles[name] = self._started(name)
        return self._handles[name]

    def _needs(self) -> dict[str, float]:
        """Ray's resources per worker."""
        config = self._config
        needs = {"CPU": config.num_cpus, "GPU": config.num_gpus if self._spec["on_gpu"] else 0.0}
        return {key: value for key, value in {**needs, **config.resources}.items() if value}

    def _wanted(self) -> int:
        if self._config.workers != "auto":
            return self._config.workers
        try:
            totals = self._ray.cluster_resources()
        except (self._ray.exceptions.RayError, ConnectionError):  # the head does not answer now
            totals = {}
        needs = self._needs().items()
        return max(1, int(min((totals.get(key, 0) / value for key, value in needs), default=1)))

    def _started(self, name: str) -> Any:
        needs = self._needs()
        options: dict[str, Any] = {
            **self._options,
            "name": name,
            "num_cpus": needs.pop("CPU", 0),
            "num_gpus": needs.pop("GPU", 0),
            "resources": needs,
        }
        if self._config.labels:
            options["label_selector"] = dict(self._config.labels)
        actor = self._ray.remote(concurrency_groups={"status": 1})(Worker)
        return actor.options(**options).remote(self._spec)

    def call(self, worker: str, method: str, *arguments: Any) -> Call:
        handle = self._handle(worker)
        remote = getattr(handle, method)
        if method in ("status", "hello"):  # answered while a batch is drawn
            remote = remote.options(concurrency_group="status")
        return Call(remote.remote(*arguments), worker, handle)

    def put(self, message: Any) -> Any:
        _require_raylet()
        return self._ray.put(message)

    def wait(self, calls: Sequence[Call], timeout_s: float) -> list[Call]:
        if not calls:
            time.sleep(timeout_s)
            return []
        by_ref = {call.ref: call for call in calls}
        done, rest = self._ray.wait(list(by_ref), num_returns=1, timeout=timeout_s)
        if done and rest:
            done += self._ray.wait(rest, num_returns=len(rest), timeout=0)[0]
        return [by_ref[ref] for ref in done]

    def result(self, call: Call) -> Any:
        _require_raylet()
        try:
            return self._ray.get(call.ref)
        except self._ray.exceptions.RayError as error:
            is_gone = isinstance(error, self._ray.exceptions.ActorDiedError)
            if is_gone and self._handles.get(call.worker) is call.handle:
                del self._handles[call.worker]  # created again by the next call
            raise WorkerLostError(_cause(error)) from None

    def restart(self, worker: str) -> None:
        self._ray.kill(self._handle(worker), no_restart=False)

    def agree(self, reference: Reference | None) -> Reference | None:
        given = reference or Reference(None, [], {})
        arguments = given.message, given.digests, given.facts
        if self._registry is None:
            options = {**self._options, "name": f"{self.name}{REGISTRY}", "num_cpus": 0}
            self._registry = self._ray.remote(Registry).options(**options).remote()
        try:
            found = self._ray.get(self._registry.agree.remote(*arguments), timeout=60)
        except self._ray.exceptions.RayError:  # it was lost with its node: a new one is asked next
            self._registry = None
            return reference
        return found and Reference(self.put(found[0]), *found[1:])

    def status(self) -> list[dict[str, Any]]:
        """One row per worker that was started: its name, state, node and pid."""
        for name, handle in self._existing().items():
            if not name.endswith(REGISTRY):
                self._handles.setdefault(name, handle)  # an actor ends with its creator's handle
        hellos = {name: self.call(name, "hello") for name in sorted(self._handles)}
        if refs := [call.ref for call in hellos.values()]:
            self._ray.wait(refs, num_returns=len(refs), timeout=5)
        rows = []
        for name, call in hellos.items():
            row: dict[str, Any] = {"worker": name, "state": self.LOADING}
            with suppress(WorkerLostError):
                if self.wait([call], 0):
                    hello = self.result(call)
                    row |= {key: hello[key] for key in ("node", "pid")}
                    is_of_a_run = self._spec["detached"] and not hello.get("detached")
                    row["state"] = hello["error"] or (self.OF_A_RUN if is_of_a_run else "ready")
            rows.append(row)
        return rows

    def stop(self) -> int:
        """End the pool's actors; their number."""
        existing = self._existing()
        for handle in existing.values():
            self._ray.kill(handle)
        return len(existing)

    def _existing(self) -> dict[str, Any]:
        """Name -> handle of the pool's actors."""
        handles = {}
        for name in self._ray.util.list_named_actors():
            if name.startswith(f"{self.name}/"):
                with suppress(ValueError):  # it has ended since
                    handles[name] = self._ray.get_actor(name)
        return handles


def connect(address: str, dist: Dist, may_start: bool = True, used: Set[str] = frozenset()) -> str:
    """Connect this rank to the cluster at `address`; every rank calls it. Returns what was found.
    With 'auto' and no cluster here, rank 0 starts Ray on this machine if `may_start`, for as long
    as this process lives, and every process of it listens on 127.0.0.1 only. `used`: devices of
    this machine that workers must not get, such as 'cuda:0'.

    Raises ValueError without Ray, without token authentication, or for a cluster that cannot be
    reached.
    """
    found = ("", "", False)
    for is_main in (True, False):  # rank 0, then the others
        failure = ""
        try:
            if dist.is_main and is_main:
                found = _join_or_start(address, dist, may_start, used)
            elif not dist.is_main and not is_main:
                _join(*found)
        except Exception as error:
            failure = str(error) if isinstance(error, ValueError) else _cause(error)
            failure = failure if "render_pool" in failure else f"render_pool.address: {failure}"
        replies = dist.gather((found, failure))
        if failures := [f"rank {rank}: {text}" for rank, (_, text) in enumerate(replies) if text]:
            raise ValueError(failures[0].removeprefix("rank 0: "))
        found = replies[0][0]
    where, _, is_local = found
    _watch_raylet()
    if is_local:
        return f"a Ray cluster on this machine, {where}, which ends with the run"
    return f"the Ray cluster at {where}"


def _join_or_start(
    address: str, dist: Dist, may_start: bool, used: Set[str]
) -> tuple[str, str, bool]:
    """Of rank 0: (address for the other ranks, token, whether it was started here)."""
    if address == "auto":
        address = _running_here() or "local"
    if address != "local":
        _require_token(address)
        _join(address)
        return _ray().get_runtime_context().gcs_address, "", False
    if not may_start:
        raise ValueError("there is no Ray cluster here; start one (`ray start`, docs/scale.md)")
    if int(os.environ.get("LOCAL_WORLD_SIZE", dist.world_size)) != dist.world_size:
        raise ValueError(
            "render_pool: no Ray cluster is found, and a run on several machines does not start "
            "one: run `ray start` on every node first (docs/scale.md)"
        )
    # Ray reads the token once: a second run of this process keeps it.
    token = os.environ.get("RAY_AUTH_TOKEN") or secrets.token_hex(32)
    _prepare_local(token)
    # Not Ray's own folder, where other programs look for it; not in TMPDIR, because a socket's path
    # has at most 107 bytes, of which Ray's names need 64.
    folder = tempfile.mkdtemp(prefix="ray_", dir=os.environ.get("RAY_TMPDIR", "/tmp"))  # nosec
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    free = _free_gpus(dist, used)
    kept = environment_without("RAY_AUTH_TOKEN", *NEEDED_SECRETS)
    changes = {} if free is None else {"CUDA_VISIBLE_DEVICES": ",".join(free)}
    hidden = (os.environ.keys() - kept.keys()) | (changes.keys() & os.environ.keys())
    before = {key: os.environ.pop(key) for key in hidden}
    os.environ.update(changes)
    try:  # Ray's processes inherit the environment
        _init("local", num_gpus=None if free is None else len(free), _temp_dir=folder)
    finally:
        for key in changes:
            del os.environ[key]
        os.environ.update(before)
    return _ray().get_runtime_context().gcs_address, token, True


def _join(address: str, token: str = "", is_local: bool = False) -> None:
    if is_local:
        _prepare_local(token)
    try:
        _init(address)
    except ConnectionError as error:
        raise ValueError(
            f"render_pool.address: no Ray cluster answers at {address!r} ({_cause(error)}); start "
            "one (`ray start`, docs/scale.md), on this machine too: a run needs a Ray process on "
            "its own node"
        ) from None


def _running_here() -> str:
    """Address of the cluster that this machine belongs to; '' if none answers."""
    if address := os.environ.get("RAY_ADDRESS"):
        return address
    with suppress(OSError, ValueError):  # no cluster, or a damaged file
        address = Path(_ADDRESS_FILE).read_text(encoding="utf-8").strip()
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=5):
            return address
    return ""


_ADDRESS_FILE = "/tmp/ray/ray_current_cluster"  # nosec B108 # Ray's own, only looked for


def _free_gpus(dist: Dist, used: Set[str]) -> list[str] | None:
    """This machine's GPUs that are neither `used` nor those of a judge that this process has
    started, as its CUDA_VISIBLE_DEVICES says; None if the ranks use none."""
    if not dist.device.startswith("cuda"):
        return None
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else list(map(str, range(torch.cuda.device_count())))
    taken: set[str] = set()
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            stated = child.environ().get("CUDA_VISIBLE_DEVICES", "")
            taken |= set(stated.split(",")) if stated != visible else set()
    free = [name for i, name in enumerate(names) if f"cuda:{i}" not in used and name not in taken]
    if not free:
        raise ValueError(
            f"render_pool: {dist.world_size} ranks (and a judge that the run starts) use all GPUs "
            "of this machine, and no Ray cluster with others is found; start fewer ranks "
            "(--nproc), or join machines with `ray start` (docs/scale.md)"
        )
    return free


def _prepare_local(token: str) -> None:
    """Environment of a cluster on this machine only; `import ray` and Ray's processes read it."""
    if "ray" in sys.modules and os.environ.get("RAY_AUTH_TOKEN") != token:
        raise ValueError(
            "render_pool: Ray was imported before the run could set its token; start "
            "Ray yourself (`ray start`, docs/scale.md)"
        )
    os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN"] = "token", token
    # Ray's switch for macOS and Windows; it makes every process listen on 127.0.0.1 only.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    # Ray gives up on a process that takes a minute to start, as on a busy machine.
    os.environ.setdefault("RAY_worker_register_timeout_seconds", "600")


def _require_token(address: str) -> None:
    """Raises ValueError if this run sends no token, or if the cluster accepts a wrong one."""
    wrong = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    if os.environ.get("RAY_AUTH_MODE") == "token":
        ask = [sys.executable, "-c", _ASK_HEAD, address]
        if subprocess.run(ask, env=wrong, capture_output=True).returncode != 0:
            return  # also an unreachable one, which is reported when the run connects
    raise ValueError(
        "render_pool: a Ray cluster without token authentication runs any code of whoever reaches "
        "its ports: set RAY_AUTH_MODE=token in the environment of `ray start` on every node and of "
        "this run, with one token for all (`ray get-auth-token --generate`, SECURITY.md). "
        "render_pool.address=local does not use that cluster"
    )


# A program that fails unless the cluster's head answers.
_ASK_HEAD = "import sys; from ray._raylet import GcsClient; GcsClient(address=sys.argv[1])"


def _init(address: str, **options: Any) -> None:
    ray = _ray()
    is_local = address == "local"
    others = set(psutil.Process().children())
    handler = signal.getsignal(signal.SIGTERM)  # which Ray replaces by one that exits
    # Ray's start is timed out on a busy machine now and then.
    for tries_left in (1, 0):
        # Ray's processes also receive a signal that asks the run to stop, and must not end first.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS if is_local else ())
        try:
            ray.init(
                address=address,
                namespace=NAMESPACE,
                include_dashboard=False if is_local else None,
                _node_ip_address="127.0.0.1" if is_local else None,
                log_to_driver=False,
                logging_level="error",
                **options,
            )
            return
        except Exception:
            if not tries_left or not is_local:
                raise
            ray.shutdown()
            for child in set(psutil.Process().children()) - others:
                child.kill()
        finally:
            signal.signal(signal.SIGTERM, handler)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _watch_raylet() -> None:
    """Interrupt the run when this machine's raylet ends, or the head that this process started.
    Without one, Ray ends this process at the next message or within a minute, and what is not saved
    is lost."""
    name = _ray()._private.worker.global_worker.node.raylet_socket_name
    _raylets.clear()
    for process in psutil.process_iter(["name", "cmdline", "ppid"]):
        is_head = process.info["name"] == "gcs_server" and process.info["ppid"] == os.getpid()
        if is_head or f"--raylet_socket_name={name}" in (process.info["cmdline"] or ()):
            _raylets.append(process)
            signal.signal(signal.SIGRTMAX, _interrupt)  # `signals.at_once` also saves, in a thread
            threading.Thread(target=_watch, args=[process], daemon=True).start()


def _watch(raylet: psutil.Process) -> None:
    raylet.wait()
    if raylet in _raylets:  # this process has not left
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGRTMAX)


def _interrupt(*_: Any) -> None:
    if _raylets:  # once
        _raylets.clear()
        raise RuntimeError(
            "render_pool: Ray's process on this machine (raylet, or the head of the run's own Ray) "
            "has ended: something killed it, or the cluster's head did not answer for a minute. "
            "The run resumes with the same command"
        )


def _require_raylet() -> None:
    """Call this before messages are sent or read."""
    for raylet in _raylets[:]:
        if not psutil.pid_exists(raylet.pid) or raylet.status() == psutil.STATUS_ZOMBIE:
            _interrupt()


def has_gpus() -> bool:
    """Whether the cluster has GPUs now."""
    return bool(_ray().cluster_resources().get("GPU", 0))


def disconnect(num_ranks: int = 1) -> None:
    """Leave the cluster. One that this process (rank 0) started ends when the other ranks have left
    it, or after `LEAVE_S`."""
    if not _raylets:  # the call below might not return
        atexit.unregister(_ray().shutdown)
        return
    own = [each for each in _raylets if each.ppid() == os.getpid()]
    _raylets.clear()
    workers, ends_s = [], time.monotonic() + LEAVE_S
    with suppress(psutil.Error):
        workers = [worker for each in own for worker in each.children(recursive=True)]
        while own and num_ranks > 1 and time.monotonic() < ends_s:
            num_ranks = sum(not job["IsDead"] for job in _ray()._private.state.jobs())
            time.sleep(0.1)
    _ray().shutdown()
    for worker in workers:  # one that still starts ignores SIGTERM, as the raylet does
        with suppress(psutil.Error):
            worker.kill()


def _ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray ends a process that does not reach the head so long, by default as soon as the raylet.
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", str(4 * RAYLET_S))
    try:
        import ray
        import ray.util
    except ImportError as error:
        raise ValueError(RAY_MISSING) from error
    return ray


def _cause(error: Exception) -> str:
    """The error's class and the start of its last line, where Ray's messages name the cause."""
    lines = [line.strip() for line in str(error).split("\n") if line.strip()]
    return f"{type(error).__name__}: {lines[-1][:120] if lines else ''}"


# ---- pooled renderer -----------------------------------------------------------------------------
# A renderer whose pictures are drawn by a pool's workers.

METRICS: Mapping[str, Metric] = {
    "pool_workers": Metric("workers", "of the render pool that could draw at the end"),
    "pool_remote_share": Metric("0..1", "share of the pictures that the pool's workers drew"),
    "pool_restarts": Metric("workers", "lost or restarted because they hung"),
    "pool_queue": Metric("batches", "of a rank that no worker drew yet, mean while it waited"),
    "pool_mb": Metric("MB", "sent to and from the workers, by each rank"),
}


class PooledRenderer(Renderer[Any]):
    """Has the interface of the renderer that its workers run. Which batch a picture is drawn in
    does not depend on the workers, so their number changes no bit."""

    def __init__(self, plugin: Any, pool: RenderPoolConfig, dist: Dist, used: Set[str]) -> None:
        """Connects to Ray and starts the workers, which load the renderer meanwhile. Raises
        ValueError if the cluster cannot be used. `plugin`: the renderer's (`build.Plugin`);
        `used`: the run's own devices."""
        import torch

        cls, config = plugin.cls, plugin.config
        super().__init__(config, Resources(None, dist.device))
        where = connect(pool.address, dist, used=used)
        spec = spec_of(cls, config, torch.get_num_threads(), dist.device)
        workers = RayWorkers(pool, spec)
        self._cls, self._pool, self._dist = cls, pool, dist
        self._here: Renderer[Any] | None = None
        self._disconnect = disconnect
        self._dispatcher = Dispatcher(
            workers,
            pool,
            lambda job: cls.batch_of(config, job),
            facts_of_code(spec),
            first=dist.rank / dist.world_size,
        )
        workers.names()  # starts them
        self.where = f"{workers.name} on {where}"

    def wait(self) -> None:
        """Wait until a worker has loaded the renderer, after loading it here too if the ranks draw.
        Raises RuntimeError if no worker can."""
        if self._pool.local:
            resources = Resources(None, self._dist.device, may_split=False)
            self._here = self._cls(self.config, resources)
            device = resolve_device(getattr(self.config, "device", "auto"), self._dist.device)
            self._dispatcher.draws_here(self._draw_here, facts_of_model(self._here, device))
        self.state_dim = self._dispatcher.state_dim()

    def _draw_here(self, jobs: Sequence[RenderJob]) -> list[Any]:
        assert self._here is not None
        drawn = dict(self._here.render(jobs))
        return [drawn[number] for number in range(len(jobs))]

    def render(self, jobs: Iterable[RenderJob]) -> Iterator[tuple[int, Any]]:
        return self._dispatcher.render(jobs)

    def encode_sources(self, samples: Sequence[Sample], area_px: int) -> list[Sample]:
        return self._prepared("encode_sources", samples, area_px)

    def decode_sources(self, samples: Sequence[Sample]) -> list[Sample]:
        return self._prepared("decode_sources", samples)

    def _prepared(self, method: str, samples: Sequence[Sample], *arguments: Any) -> list[Sample]:
        if getattr(self._cls, method) is getattr(Renderer, method):
            return list(samples)
        if self._here is not None:
            return list(getattr(self._here, method)(samples, *arguments))
        return self._dispatcher.prepare(method, samples, *arguments)

    def take_metrics(self) -> Mapping[str, float]:
        return self._dispatcher.take_metrics()

    def close(self) -> None:
        if self._here is not None:
            self._here.close()
        self._disconnect(self._dist.world_size)


def pooled(plugin: Any, pool: RenderPoolConfig, dist: Dist, used: Set[str]) -> PooledRenderer:
    """The renderer of `plugin` in a pool, with the metrics of both."""
    metrics = {**plugin.cls.metrics, **METRICS}
    members = {"metrics": metrics, "accepts": plugin.cls.accepts}
    made: PooledRenderer = type("Pooled", (PooledRenderer,), members)(plugin, pool, dist, used)
    return made
