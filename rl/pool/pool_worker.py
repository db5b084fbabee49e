"""A worker of a render pool: one renderer in a process of its own, on any machine."""

from __future__ import annotations

import os
import platform
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from hashlib import blake2b
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rl.api.plugin import PlacedConfig, Resources, reported_by
from rl.api.renderer import Renderer
from rl.model_files import fingerprint
from rl.pool import wire
from rl.ranks.dist import resolve_device
from rl.ranks.error_messages import is_lost_device

PACKAGES = ("torch", "diffusers", "transformers", "numpy", "pillow")


def facts_of_code(spec: Mapping[str, Any]) -> dict[str, str]:
    """What rank and workers must share, known without loading the model."""
    facts = {"python": platform.python_version(), "rl": _source_digest(), "config": digest_of(spec)}
    return facts | {package: version(package) for package in PACKAGES}


def digest_of(spec: Mapping[str, Any]) -> str:
    """Of the renderer's class and section: pools of other renderers have another name."""
    keys = ("module", "class", "on_gpu")
    text = repr(([spec[key] for key in keys], sorted(spec["section"].items())))
    return blake2b(text.encode(), digest_size=6).hexdigest()


@cache
def _source_digest() -> str:
    """Of the renderers and the pool, which two commits with one version may have differently."""
    rooms = (Path(__file__).parent, Path(__file__).parents[1] / "renderers")
    files = sorted(file for room in rooms for file in room.rglob("*.py"))
    return blake2b(b"".join(file.read_bytes() for file in files), digest_size=6).hexdigest()


def spec_of(cls: type[Renderer[Any]], config: Any, num_threads: int, device: str) -> dict[str, Any]:
    """What a worker needs to create the renderer. Relative paths in the section, and plugins of the
    user's, are found from the trainer's working folder and `sys.path`. `device`: the rank's; the
    workers use GPUs if the renderer would on the rank."""
    section = config.model_dump(mode="json", exclude_unset=True)
    if isinstance(config, PlacedConfig):
        device, section["device"] = resolve_device(config.device, device), "auto"
    names = {"module": cls.__module__, "class": cls.__name__, "section": section}
    names["on_gpu"] = device.startswith("cuda")
    return {**names, "num_threads": num_threads, "cwd": os.getcwd(), "path": sys.path}


class Worker:
    """Draws one batch at a time. No method raises: errors are part of the answer, so that no
    exception is pickled."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._incarnation = uuid.uuid4().hex
        self._detached = spec["detached"]
        self._drawing_since_s: float | None = None
        self._checked: list[str] = []
        self._drawn: list[str] = []
        """What it drew of the batch with the digests `_checked`."""
        self._error = ""
        self._facts: dict[str, str] = {}
        self._state_dim: int | None = None
        try:
            self._load(spec)
        except Exception as error:
            self._error = _text_of(error)

    def _load(self, spec: Mapping[str, Any]) -> None:
        import torch

        if os.path.isdir(spec["cwd"]):
            os.chdir(spec["cwd"])
        sys.path += [path for path in spec["path"] if path not in sys.path]
        torch.set_num_threads(spec["num_threads"])
        cls = getattr(import_module(spec["module"]), spec["class"])
        config = cls.Config.model_validate(spec["section"])
        if spec["on_gpu"] and not torch.cuda.is_available():
            raise RuntimeError("Ray gave this worker no GPU (render_pool.num_gpus)")
        device = "cuda:0" if spec["on_gpu"] else "cpu"
        torch.backends.cudnn.allow_tf32 = False  # as on the ranks
        if spec["on_gpu"] and (limit_gb := getattr(config, "max_memory_gb", None)):
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, limit_gb * 1e9 / total), 0)
        self._renderer: Renderer[Any] = cls(config, Resources(None, device, may_split=False))
        self._state_dim = self._renderer.state_dim
        self._facts = facts_of_code(spec) | facts_of_model(self._renderer, device)

    def hello(self) -> dict[str, Any]:
        return {
            "incarnation": self._incarnation,
            "error": self._error,
            "facts": self._facts,
            "state_dim": self._state_dim,
            "detached": self._detached,
            "pid": os.getpid(),
            "node": platform.node(),
        }

    def draw(self, message: wire.Message) -> dict[str, Any]:
        """Draw a batch: {'outcomes', 'seconds'}, or {'raised': (type, text)}."""

        def outcomes() -> list[Any]:
            jobs = wire.unpacked_jobs(message)
            drawn = dict(self._renderer.render(jobs))
            return wire.packed_outcomes([drawn[number] for number in range(len(jobs))])

        return self._answer(outcomes)

    def check(self, message: wire.Message, digests: list[str]) -> dict[str, Any]:
        """Draw the pool's first batch, whose pictures have these `digests`; once for all ranks:
        {'digests': this worker's}, or as `draw`."""
        if self._checked != digests:
            answer = self.draw(message)
            if "raised" in answer:
                return answer
            self._checked, self._drawn = digests, wire.digests(answer["outcomes"])
        return {"incarnation": self._incarnation, "digests": self._drawn}

    def prepare(self, message: wire.Message, method: str, *arguments: Any) -> dict[str, Any]:
        """Call `encode_sources` or `decode_sources`: {'outcomes': a message of samples}."""

        def samples() -> wire.Message:
            of = getattr(self._renderer, method)
            return wire.packed_samples(of(wire.unpacked_samples(message), *arguments))

        return self._answer(samples)

    def status(self) -> float:
        """Seconds since the batch that is being drawn was begun; 0 if none is."""
        since_s = self._drawing_since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    def _answer(self, work: Any) -> dict[str, Any]:
        self._drawing_since_s = since_s = time.monotonic()
        answer: dict[str, Any] = {"incarnation": self._incarnation}
        try:
            answer["outcomes"] = work()
        except Exception as error:
            if is_lost_device(error):
                os._exit(1)  # Ray starts the worker again
            answer["raised"] = (type(error).__name__, _text_of(error))
        reported = {} if self._error else reported_by(self._renderer)
        answer["metrics"] = {} if isinstance(reported, Exception) else dict(reported)
        answer["seconds"] = time.monotonic() - since_s
        self._drawing_since_s = None
        return answer


def facts_of_model(renderer: Any, device: str) -> dict[str, str]:
    """Device, threads and weights of a loaded renderer."""
    import torch

    name = f"cpu {torch.backends.cpu.get_cpu_capability()}"
    if device.startswith("cuda"):
        name = f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
    tensors: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    """Kind of device -> name -> tensor; some weights may stay on the host."""
    for number, module in enumerate(_modules(renderer, 4)):
        for key, tensor in module.state_dict().items():
            tensors[tensor.device.type][f"{number}.{key}"] = tensor
    dtypes = {str(tensor.dtype) for part in tensors.values() for tensor in part.values()}
    return {
        "device": name,
        "threads": str(torch.get_num_threads()),
        "dtypes": ", ".join(sorted(dtypes)),
        "weights": " ".join(fingerprint(part) for _, part in sorted(tensors.items())),
    }


def _modules(value: Any, depth: int) -> Iterator[Any]:
    """The torch modules that a renderer holds, at most `depth` attributes away."""
    import torch

    if isinstance(value, torch.nn.Module):
        yield value
    elif depth and isinstance(value, tuple | list):
        for item in value:
            yield from _modules(item, depth - 1)
    elif depth and type(value).__module__ != "builtins":
        for item in getattr(value, "__dict__", {}).values():
            yield from _modules(item, depth - 1)


def _text_of(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:2000] or 'no message'}"
