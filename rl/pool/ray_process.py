"""The process beside a rank that uses Ray: it sends batches to actors, each with a renderer.

`rl.pool.pooled_renderer` starts it and speaks to it through a pipe. Ray ends a process whose raylet
dies, and replaces its signal handlers: so it may have this process, and no rank.
"""

from __future__ import annotations

import logging
import os
import pickle  # nosec B403 - between a rank and its own process
import queue
import secrets
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any, Literal, NamedTuple

from rl.api.plugin import PlacedConfig, Resources, reported_by
from rl.api.renderer import Renderer
from rl.api.types import RenderFailure, RenderJob
from rl.config.schema import RAY_MISSING, RenderPoolConfig
from rl.files import digest
from rl.progress import duration, warn
from rl.ranks import signals
from rl.ranks.dist import resolve_device

POLL_S = 0.2
LOOK_EVERY_S = 2.0
"""Interval at which actors are started in place of those that died."""
AT_ONCE = 2
"""Batches that a rank keeps at an actor: one is drawn while the next is on its way."""
MAX_TRIES = 3
"""Actors that may die of a batch before its pictures are UNGRADED; starts of an actor in a row."""
MAX_WAIT_S = 1800.0
"""How long a run waits while there is no actor before it saves and stops."""
WARN_EVERY_S = 60.0
RAY_ENDED = (
    "render_pool: Ray's process on this machine (raylet) has ended: something killed it, or the "
    "cluster's head did not answer for a minute. The run resumes with the same command"
)
NAMESPACE = "vlm_edit_rl"
FIRST = "first"
"""Name of the actor that draws every rank's first batch; all others check one of these."""
INHERITED = ("TORCH_", "CUBLAS_", "CUDNN_", "NVIDIA_", "OMP_", "MKL_", "HF_HUB_", "HF_HOME")
"""Beginnings of the environment variables that an actor gets from the rank: they change where a
model is found and how it computes."""

Kind = Literal["draw", "prepare"]


class Start(NamedTuple):
    """A rank's first message."""

    spec: Mapping[str, Any]
    pool: RenderPoolConfig
    offset: float
    """Rank / number of ranks: each rank begins with another actor."""


class Task(NamedTuple):
    """A rank's request."""

    number: int
    kind: Kind
    arguments: tuple[Any, ...]
    """draw: (jobs,); prepare: (the renderer's method, its arguments)."""


class Done(NamedTuple):
    """The answer to a task."""

    number: int
    result: Any
    """draw: an outcome per job; prepare: what the method returned; a failure if actors died."""
    metrics: Mapping[str, float]
    drawn_by: str


class State(NamedTuple):
    """What a rank learns about the pool whenever it changes."""

    num_ready: int
    num_lost: int
    state_dim: int | None


class Failed(NamedTuple):
    """The pool cannot go on."""

    text: str


def send(pipe: Connection, message: NamedTuple | str) -> None:
    """Send without torch's own pickling, which would share memory and not copy it."""
    pipe.send_bytes(pickle.dumps(message, protocol=5))


def receive(pipe: Connection) -> Any:
    """Wait for a message. Raises EOFError if the other end is closed."""
    return pickle.loads(pipe.recv_bytes())  # nosec B301


# ---- actors --------------------------------------------------------------------------------------


def spec_of(cls: type[Renderer[Any]], config: Any, num_threads: int, device: str) -> dict[str, Any]:
    """What an actor needs to make the renderer. Relative paths in the section, and the user's own
    plugins, are found from the rank's working folder and `sys.path`. `device`: the rank's; actors
    use GPUs if the renderer would use one on the rank."""
    section = config.model_dump(mode="json", exclude_unset=True)
    if isinstance(config, PlacedConfig):
        device, section["device"] = resolve_device(config.device, device), "auto"
    names = {"module": cls.__module__, "class": cls.__name__, "section": section}
    places = {"cwd": os.getcwd(), "path": sys.path}
    return {**names, **places, "on_gpu": device.startswith("cuda"), "num_threads": num_threads}


class Worker:
    """A Ray actor with a renderer, which draws one batch at a time."""

    def __init__(
        self, spec: Mapping[str, Any], reference: tuple[Sequence[RenderJob], Sequence[str]] | None
    ) -> None:
        """`reference`: the pool's first batch and the digests of its pictures. Raises RuntimeError
        if they are drawn with other bits here, so that nothing is drawn by this actor."""
        import torch

        if os.path.isdir(spec["cwd"]):
            os.chdir(spec["cwd"])
        sys.path += [path for path in spec["path"] if path not in sys.path]
        torch.set_num_threads(spec["num_threads"])
        cls = getattr(import_module(spec["module"]), spec["class"])
        if spec["on_gpu"] and not torch.cuda.is_available():
            raise RuntimeError("Ray gave it no GPU (render_pool.num_gpus)")
        torch.backends.cudnn.allow_tf32 = False  # as on the ranks
        config = cls.Config.model_validate(spec["section"])
        if spec["on_gpu"] and (limit_gb := getattr(config, "max_memory_gb", None)):
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, limit_gb * 1e9 / total), 0)
        resources = Resources(None, "cuda:0" if spec["on_gpu"] else "cpu", may_split=False)
        self._renderer: Renderer[Any] = cls(config, resources)
        if reference is not None:
            jobs, expected = reference
            if digests_of(self.draw(jobs)[0]) != list(expected):
                raise RuntimeError(
                    "it draws other bits of the first batch than the pool: it has other weights, "
                    "versions, kernels or settings"
                )

    def state_dim(self) -> int | None:
        return self._renderer.state_dim

    def draw(self, jobs: Sequence[RenderJob]) -> tuple[list[Any], Mapping[str, float]]:
        """(an outcome per job, the renderer's metrics)."""
        drawn = dict(self._renderer.render(jobs))
        reported = reported_by(self._renderer)
        metrics = {} if isinstance(reported, Exception) else dict(reported)
        return [drawn[number] for number in range(len(jobs))], metrics

    def prepare(self, method: str, *arguments: Any) -> tuple[Any, Mapping[str, float]]:
        """(the result of the renderer's `encode_sources` or `decode_sources`, no metrics)."""
        return getattr(self._renderer, method)(*arguments), {}


def digests_of(outcomes: Sequence[Any]) -> list[str]:
    """A hash of each picture's pixels, or the failure's text."""
    return [
        repr(o) if o is None or isinstance(o, RenderFailure) else digest(o).hex() for o in outcomes
    ]


class Registry:
    """A Ray actor that keeps the pool's first batch for actors that start later."""

    def __init__(self) -> None:
        self._reference: Any = None

    def agree(self, reference: Any) -> Any:
        """The reference; the first one that is given is kept (None: only asks)."""
        self._reference = self._reference or reference
        return self._reference


# ---- pool ----------------------------------------------------------------------------------------


@dataclass(eq=False)
class Running:
    """A call of an actor."""

    task: Task
    name: str
    handle: Any


@dataclass(eq=False)
class Pool:
    """The actors, and the tasks of one rank."""

    ray: Any
    start: Start
    options: Mapping[str, Any]
    """Of Ray, for every actor: resources, environment, namespace."""
    prefix: str
    """Beginning of the actors' names: those of one run."""
    num_lost: int = 0
    state_dim: int | None = None
    handles: dict[str, Any] = field(default_factory=dict)
    starting: dict[Any, str] = field(default_factory=dict)
    """Call of `state_dim`, which is answered when the renderer is loaded -> actor."""
    ready: list[str] = field(default_factory=list)
    failures: dict[str, list[str]] = field(default_factory=dict)
    """Actor -> why it could not be started, each time since it last was."""
    waiting: deque[Task] = field(default_factory=deque)
    running: dict[Any, Running] = field(default_factory=dict)
    tries: dict[int, int] = field(default_factory=dict)
    reference: Any = None
    """(the first batch that was drawn, the digests of its pictures)."""
    registry: Any = None
    _looked_s: float = -1e9
    _ready_s: float = field(default_factory=time.monotonic)
    _warned_s: float = -1e9

    def step(self) -> list[Done]:
        """Start actors and calls, wait at most `POLL_S` for one; the tasks that are done. Raises
        RuntimeError if no actor can be started or none has been ready for `MAX_WAIT_S`, and what
        the renderer raises."""
        self._look()
        self._send()
        calls = [*self.starting, *self.running]
        if not calls:
            return []
        finished, _ = self.ray.wait(calls, num_returns=1, timeout=POLL_S)
        done = []
        for call in finished:
            if call in self.starting:
                self._started(self.starting.pop(call), call)
            else:
                done += self._finished(self.running[call], call)
                del self.running[call]
        return done

    def _look(self) -> None:
        """Start missing actors, and give up without any."""
        now_s = time.monotonic()
        if now_s - self._looked_s < LOOK_EVERY_S:
            return
        self._looked_s = now_s
        own = self.ray.get_runtime_context().get_node_id()
        if own not in [node["NodeID"] for node in self.ray.nodes() if node["Alive"]]:
            raise RuntimeError(RAY_ENDED)
        self.reference = self.reference or self._agree(None)
        for name in self._wanted():
            if name not in self.handles and len(self.failures.get(name, ())) < MAX_TRIES:
                actor = self.ray.remote(Worker).options(
                    **self.options, name=f"{self.prefix}/{name}"
                )
                self.handles[name] = actor.remote(self.start.spec, self.reference)
                self.starting[self.handles[name].state_dim.remote()] = name
        if self.ready:
            self._ready_s = now_s
            return
        waited_s = now_s - self._ready_s
        if waited_s > MAX_WAIT_S or not self.handles:
            reasons = "".join(f"\n{name}: {whys[-1]}" for name, whys in self.failures.items())
            raise RuntimeError(
                f"render_pool: no worker can draw after {duration(waited_s)}; `ray status` says "
                f"more. The run resumes with the same command{reasons}"
            )
        if waited_s > WARN_EVERY_S / 4 and now_s - self._warned_s > WARN_EVERY_S:
            self._warned_s = now_s
            warn(
                f"render_pool: no worker is ready for {duration(waited_s)} now; the run waits up "
                f"to {duration(MAX_WAIT_S)}"
            )

    def _wanted(self) -> list[str]:
        """Names of the actors that should exist; Ray keeps those without a place in its queue."""
        if self.reference is None:
            return [FIRST]
        workers = self.start.pool.workers
        number = workers if isinstance(workers, int) else self._places()
        return [str(n) for n in range(number - (FIRST in self.handles))]

    def _places(self) -> int:
        """Number of actors that the cluster has room for; at least one."""
        totals = self.ray.cluster_resources()
        needs = {"GPU": self.options["num_gpus"], "CPU": self.options["num_cpus"]}
        needs |= self.options["resources"]
        places = (totals.get(key, 0) / value for key, value in needs.items() if value)
        return max(1, int(min(places, default=1)))

    def _send(self) -> None:
        """Send tasks to the actors with the fewest calls, to each at most `AT_ONCE`."""
        while self.waiting and self.ready:
            begin = int(self.start.offset * len(self.ready))
            busy = [each.name for each in self.running.values()]
            name = min(self.ready[begin:] + self.ready[:begin], key=busy.count)
            if busy.count(name) >= AT_ONCE:
                return
            task = self.waiting.popleft()
            handle = self.handles[name]
            call = getattr(handle, task.kind).remote(*task.arguments)
            self.running[call] = Running(task, name, handle)

    def _started(self, name: str, call: Any) -> None:
        try:
            self.state_dim = self.ray.get(call)
            self.ready.append(name)
            self.failures.pop(name, None)
        except self.ray.exceptions.RayError as error:
            self.failures.setdefault(name, []).append(_last_line(error))
            warn(f"render_pool: worker {name} could not be started: {_last_line(error)}")
            self.handles.pop(name, None)

    def _finished(self, done: Running, call: Any) -> list[Done]:
        task = done.task
        try:
            result, metrics = self.ray.get(call)
        except self.ray.exceptions.RayError as error:
            is_own = isinstance(error, self.ray.exceptions.RayTaskError)  # the renderer's
            if is_own and not signals.is_lost_device(error.cause):
                text = f"render_pool: worker {done.name}: {_last_line(error)}"
                raise RuntimeError(text) from None
            self._lose(done, _last_line(error))
            if self.tries.get(task.number, 0) < MAX_TRIES:
                self.waiting.appendleft(task)
                return []
            text = f"worker_lost: {_last_line(error)} (after {MAX_TRIES} tries)"
            return [Done(task.number, RenderFailure(text), {}, "")]
        is_first = task.kind == "draw" and self.reference is None
        if is_first and not any(o is None or isinstance(o, RenderFailure) for o in result):
            reference = (task.arguments[0], digests_of(result))
            self.reference = self._agree(reference) or reference
        return [Done(task.number, result, metrics, f"{self.prefix}/{done.name}")]

    def _agree(self, reference: Any) -> Any:
        if self.registry is None:
            nothing: Mapping[str, Any] = {"num_cpus": 0, "num_gpus": 0, "resources": {}}
            options = {**self.options, **nothing, "runtime_env": {}}
            actor = self.ray.remote(Registry).options(**options, name=f"{self.prefix}/registry")
            self.registry = actor.remote()  # kept: an actor ends with its creator's handle
        try:
            return self.ray.get(self.registry.agree.remote(reference), timeout=60)
        except self.ray.exceptions.RayError:  # it was lost with its node; asked again soon
            self.registry = None
            return None

    def _lose(self, call: Running, reason: str) -> None:
        """Forget the actor of a call; another one is started in its place. The batch that it was
        drawing is its oldest one."""
        if self.handles.get(call.name) is call.handle:  # else an earlier call has reported it
            del self.handles[call.name]
            self.ready.remove(call.name)
            self.num_lost += 1
            drawn = next(each.task for each in self.running.values() if each.handle is call.handle)
            self.tries[drawn.number] = self.tries.get(drawn.number, 0) + 1
            warn(f"render_pool: worker {call.name} is lost ({reason}); another draws its batches")
            self.ray.kill(call.handle)


def _last_line(error: Exception) -> str:
    """The last line of Ray's message, which names the cause."""
    lines = [line.strip() for line in str(error).split("\n") if line.strip()]
    return lines[-1][:200] if lines else type(error).__name__


# ---- cluster -------------------------------------------------------------------------------------


def connect(address: str) -> Any:
    """Connect this process to the cluster at `address`; Ray's module. Raises ValueError without
    Ray, without token authentication, or for a cluster that cannot be reached."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise ValueError(RAY_MISSING) from error
    _require_token(address)
    try:
        ray.init(
            address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR
        )
    except ConnectionError as error:
        raise ValueError(
            f"render_pool.address: no Ray cluster answers at {address!r} ({_last_line(error)}); "
            "start one (`ray start`, docs/scale.md), on this machine too: a run needs a Ray "
            "process on its own node"
        ) from None
    return ray


def _require_token(address: str) -> None:
    """Raises ValueError if this run sends no token, or if the cluster accepts a wrong one."""
    wrong = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    if os.environ.get("RAY_AUTH_MODE") == "token":
        ask = [sys.executable, "-c", _ASK_HEAD, address]
        with suppress(subprocess.TimeoutExpired):
            if subprocess.run(ask, env=wrong, capture_output=True, timeout=300).returncode == 0:
                raise ValueError(NO_TOKEN)
        return  # also an unreachable one, which is reported when the run connects
    raise ValueError(NO_TOKEN)


NO_TOKEN = (
    "render_pool: a Ray cluster without token authentication runs any code of whoever reaches its "
    "ports: set RAY_AUTH_MODE=token in the environment of `ray start` on every node and of this "
    "run, with one token for all (`ray get-auth-token --generate`; docs/scale.md)"
)
# A program that fails unless the cluster answers.
_ASK_HEAD = "import ray, sys; ray.init(address=sys.argv[1], log_to_driver=False)"


def _work(rank: Connection, ray: Any, start: Start) -> None:
    env = {key: value for key, value in os.environ.items() if key.startswith(INHERITED)}
    options = {
        "namespace": NAMESPACE,
        "get_if_exists": True,
        "num_cpus": 1,
        "num_gpus": start.pool.num_gpus if start.spec["on_gpu"] else 0,
        "resources": dict(start.pool.resources),
        "runtime_env": {"env_vars": env},
    }
    pool = Pool(ray, start, options, start.spec["name"])
    tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
    # The rank must never wait for this process to read, which may wait for the rank to read.
    threading.Thread(target=_read, args=[rank, tasks], daemon=True).start()
    told = None
    while True:
        with suppress(queue.Empty):
            while True:
                awaits_actor = pool.starting or pool.running  # up to `POLL_S`, in each step
                task = tasks.get(timeout=0 if awaits_actor else POLL_S)
                if task is None:
                    return
                pool.waiting.append(task)
        done = pool.step()
        state = State(len(pool.ready), pool.num_lost, pool.state_dim)
        if state != told:
            send(rank, state)
            told = state
        for each in done:
            send(rank, each)


def _read(rank: Connection, tasks: queue.SimpleQueue[Task | None]) -> None:
    """Read the rank's tasks; None at the end of the pipe."""
    try:
        while True:
            tasks.put(receive(rank))
    except (EOFError, OSError):
        tasks.put(None)


def main(descriptor: int) -> None:
    """Answer the rank at the other end of the pipe `descriptor`, until it closes it."""
    rank = Connection(descriptor)
    try:
        start: Start = receive(rank)
        ray = connect(start.pool.address)
        try:
            send(rank, f"the Ray cluster at {ray.get_runtime_context().gcs_address}")
            _work(rank, ray, start)
        finally:
            ray.shutdown()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass
    except Exception as error:
        with suppress(OSError):
            send(rank, Failed(str(error) or type(error).__name__))
