"""A render worker, and the messages between it and the trainer, which hold no classes."""

from __future__ import annotations

import os
import platform
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from hashlib import blake2b
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from rl.api.plugin import PlacedConfig, Resources, reported_by
from rl.api.renderer import Renderer
from rl.api.types import HiddenStates, RenderFailure, RenderJob, Sample
from rl.files import digest
from rl.model_files import fingerprint
from rl.ranks.dist import resolve_device
from rl.ranks.signals import is_lost_device

# ---- wire ----------------------------------------------------------------------------------------
# Turns render jobs, samples and outcomes into plain containers of NumPy arrays, and back.
#
# Ray pickles these containers and maps the arrays from shared memory. No class of this project is
# pickled, so a worker accepts only what `unpacked_jobs` and `unpacked_samples` can build.

MAX_BYTES = 2**30
"""Limit of one message's arrays."""
DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.float16, torch.bfloat16)}
PREPARED = ("sources", "target", "source_codes", "target_codes")
"""Fields of `Sample` that a renderer may fill in."""
Message = dict[str, Any]
"""{'items': jobs or samples as dicts, 'arrays': the arrays that they name by their index}."""


class _Arrays:
    """Arrays of one message. Equal pictures and shared tensors are sent once."""

    def __init__(self) -> None:
        self.arrays: list[np.ndarray] = []
        self._known: dict[Any, Any] = {}
        self._num_bytes = 0

    def add(self, array: np.ndarray) -> int:
        self._num_bytes += array.nbytes
        if self._num_bytes > MAX_BYTES:
            raise ValueError(
                f"a batch for the render pool has more than {MAX_BYTES / 1e9:.1f} GB; "
                "lower renderer.batch_size"
            )
        self.arrays.append(np.ascontiguousarray(array))
        return len(self.arrays) - 1

    def tensor(self, tensor: torch.Tensor | None) -> Message | None:
        if tensor is None:
            return None
        if str(tensor.dtype) not in DTYPES:
            kinds = ", ".join(DTYPES)
            raise TypeError(f"a render pool cannot send states of {tensor.dtype}; give {kinds}")
        key = (tensor.data_ptr(), tuple(tensor.shape), tensor.dtype)
        if key not in self._known:
            on_cpu = tensor.detach().cpu().contiguous()
            data = on_cpu.view(torch.int16) if on_cpu.dtype == torch.bfloat16 else on_cpu
            self._known[key] = {"dtype": str(tensor.dtype), "array": self.add(data.numpy())}
        return dict(self._known[key])

    def picture(self, image: Image.Image | None) -> int | None:
        if image is None:
            return None
        key = digest(image)
        if key not in self._known:
            known = image if image.mode in ("RGB", "RGBA") else image.convert("RGBA")
            self._known[key] = self.add(np.asarray(known))
        return int(self._known[key])

    def codes(self, codes: np.ndarray | None) -> int | None:
        return None if codes is None else self.add(codes)


def packed_jobs(jobs: Iterable[RenderJob]) -> Message:
    """The jobs of a batch, without what only rewards read. Raises ValueError for more than
    `MAX_BYTES`, TypeError for a payload that is neither text, codes nor hidden states."""
    arrays = _Arrays()
    items = []
    for job in jobs:
        sample = replace(job.sample, target=None, target_codes=None)
        payload = _packed_payload(job.payload, arrays)
        items.append(
            {"sample": _packed_sample(sample, arrays), "seed": job.noise_seed, "payload": payload}
        )
    return {"items": items, "arrays": arrays.arrays}


def packed_samples(samples: Iterable[Sample]) -> Message:
    """Samples with their pictures and codes, without what only rewards read."""
    arrays = _Arrays()
    items = [_packed_sample(sample, arrays) for sample in samples]
    return {"items": items, "arrays": arrays.arrays}


def unpacked_jobs(message: Message) -> list[RenderJob]:
    arrays = message["arrays"]
    return [
        RenderJob(
            _unpacked_sample(item["sample"], arrays),
            _unpacked_payload(item["payload"], arrays),
            int(item["seed"]),
        )
        for item in message["items"]
    ]


def unpacked_samples(message: Message) -> list[Sample]:
    return [_unpacked_sample(item, message["arrays"]) for item in message["items"]]


def packed_outcomes(outcomes: Sequence[Any]) -> list[Any]:
    """Per job [H, W, 3] uint8, (reason, blame) of a failure, or None."""
    packed: list[Any] = []
    for outcome in outcomes:
        if isinstance(outcome, RenderFailure):
            packed.append((outcome.reason, outcome.blame))
        else:
            packed.append(None if outcome is None else np.asarray(outcome.convert("RGB")))
    return packed


def unpacked_outcome(packed: Any) -> Image.Image | RenderFailure | None:
    if isinstance(packed, tuple):
        return RenderFailure(*packed)
    return None if packed is None else Image.fromarray(packed)


def digests_of(outcomes: Sequence[Any]) -> list[str]:
    """A hash per packed outcome: of the 8-bit pixels, or of the failure."""
    return [
        digest(Image.fromarray(each)).hex() if isinstance(each, np.ndarray) else repr(each)
        for each in outcomes
    ]


def _packed_sample(sample: Sample, arrays: _Arrays) -> Message:
    return {
        "id": sample.id,
        "instruction": sample.instruction,
        "category": sample.category,
        "sources": [arrays.picture(source) for source in sample.sources],
        "target": arrays.picture(sample.target),
        "source_codes": arrays.codes(sample.source_codes),
        "target_codes": arrays.codes(sample.target_codes),
    }


def _unpacked_sample(item: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> Sample:
    def picture(index: int | None) -> Any:
        return None if index is None else Image.fromarray(arrays[index])

    def codes(index: int | None) -> np.ndarray | None:
        return None if index is None else arrays[index]

    return Sample(
        str(item["id"]),
        str(item["instruction"]),
        sources=tuple(picture(source) for source in item["sources"]),
        target=picture(item["target"]),
        source_codes=codes(item["source_codes"]),
        target_codes=codes(item["target_codes"]),
        category=str(item["category"]),
    )


def _packed_payload(payload: Any, arrays: _Arrays) -> Any:
    if isinstance(payload, str):
        return payload
    if isinstance(payload, np.ndarray):
        return {"codes": arrays.codes(payload)}
    if not isinstance(payload, HiddenStates):
        raise TypeError(
            f"a render pool cannot send a payload of type {type(payload).__name__}: give the "
            "renderer text, codes (a NumPy array) or HiddenStates"
        )
    return {
        "embeds": arrays.tensor(payload.embeds),
        "negative": arrays.tensor(payload.negative_embeds),
        "pictures": [(part.start, part.stop) for part in payload.pictures],
    }


def _unpacked_payload(packed: Any, arrays: Sequence[np.ndarray]) -> Any:
    if isinstance(packed, str):
        return packed
    if "codes" in packed:
        return arrays[packed["codes"]]

    def tensor(item: Mapping[str, Any] | None) -> Any:
        if item is None:
            return None
        # A copy, because Ray's arrays cannot be written.
        data = torch.from_numpy(arrays[item["array"]].copy())
        return data.view(DTYPES[item["dtype"]])

    return HiddenStates(
        tensor(packed["embeds"]),
        tensor(packed["negative"]),
        tuple(range(start, stop) for start, stop in packed["pictures"]),
    )


# ---- pool worker ---------------------------------------------------------------------------------
# A worker of a render pool: one renderer in a process of its own, on any machine.

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

    def draw(self, message: Message) -> dict[str, Any]:
        """Draw a batch: {'outcomes', 'seconds'}, or {'raised': (type, text)}."""

        def outcomes() -> list[Any]:
            jobs = unpacked_jobs(message)
            drawn = dict(self._renderer.render(jobs))
            return packed_outcomes([drawn[number] for number in range(len(jobs))])

        return self._answer(outcomes)

    def check(self, message: Message, digests: list[str]) -> dict[str, Any]:
        """Draw the pool's first batch, whose pictures have these `digests`; once for all ranks:
        {'digests': this worker's}, or as `draw`."""
        if self._checked != digests:
            answer = self.draw(message)
            if "raised" in answer:
                return answer
            self._checked, self._drawn = digests, digests_of(answer["outcomes"])
        return {"incarnation": self._incarnation, "digests": self._drawn}

    def prepare(self, message: Message, method: str, *arguments: Any) -> dict[str, Any]:
        """Call `encode_sources` or `decode_sources`: {'outcomes': a message of samples}."""

        def samples() -> Message:
            of = getattr(self._renderer, method)
            return packed_samples(of(unpacked_samples(message), *arguments))

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
