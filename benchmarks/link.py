"""A worker's end of the connection to `Contestant`: receives orders, measures iterations."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from torch.utils.flop_counter import FlopCounterMode

from benchmarks.flop_counter import flop_counter
from benchmarks.meter import Meter, Spent

POLICY = "policy side"
"""All work with the policy: preprocessing, conditioning, log-probs, reference, training step."""
TOWER = "vision tower"
"""Part of the policy side."""
VAE_ENCODE = "VAE encode"
VAE_DECODE = "VAE decode"
RENDER = "DiT"
"""The DiT and the rest of the render loop."""
SAMPLING = "sampling"
"""transformers' `generate`, the same for TRL and for this project."""
JUDGE_WAIT = "judge wait"
REST = "rest"
"""The trainer's bookkeeping, records and logs."""
OTHER_THREADS = "other threads"
"""CPU seconds of all threads but the main one, e.g. for PNG, HTTP and records."""
POLICY_PARTS = (POLICY, TOWER)
PARTS = (*POLICY_PARTS, VAE_ENCODE, VAE_DECODE, RENDER, SAMPLING, JUDGE_WAIT, REST, OTHER_THREADS)


@dataclass(frozen=True)
class Measured:
    """A worker's reply: the measurements of one iteration."""

    spent: Mapping[str, Spent]
    """Cost of each of `PARTS`."""
    positions: int = 0
    """Tokens that the language model read, once for each pass."""
    peak_mb: float = 0.0
    """Peak resident memory so far minus the memory before the first iteration, 1e6 B."""


class Link:
    """Measures a worker's iterations and sends the results over `connection`."""

    def __init__(self, connection: Connection, names: Mapping[str, str]) -> None:
        """`names`: label of a meter's span -> one of `PARTS`; other labels count as `REST`."""
        self._connection = connection
        self._names = names
        self._counting = ExitStack()
        self._counter: FlopCounterMode | None = None
        self._baseline_mb: float | None = None
        self._process_s = 0.0
        self.flush: Callable[[], None] = lambda: None
        """Waits until other threads have finished the iteration's work."""
        self.meter = Meter(flops_so_far=self._flops_so_far)

    def _flops_so_far(self) -> float:
        return self._counter.get_total_flops() if self._counter else 0.0

    def begin(self) -> None:
        """Waits for the next order and starts to measure. An order says whether to count FLOPs; the
        counter is slow, so the measured seconds then mean nothing."""
        counts_flops = self._connection.recv()
        if self._baseline_mb is None:
            self._baseline_mb = resident_mb()
            reset_peak()
        if counts_flops:
            self._counter = self._counting.enter_context(flop_counter())
        self._process_s = time.process_time()
        self.meter.reset()

    def end(self) -> None:
        """Sends the measurements since `begin`."""
        self.flush()
        spent: dict[str, Spent] = {}
        for label, cost in self.meter.read().items():
            part = self._names.get(label, REST)
            spent[part] = spent.get(part, Spent()) + cost
        main_s = sum(cost.cpu_s for cost in spent.values())
        others_s = time.process_time() - self._process_s - main_s
        spent[OTHER_THREADS] = Spent(cpu_s=max(0.0, others_s))
        self._counting.close()
        self._counter = None
        assert self._baseline_mb is not None
        above_mb = resident_mb("VmHWM") - self._baseline_mb
        self._connection.send(Measured(spent, self.meter.positions, above_mb))


def resident_mb(key: str = "VmRSS") -> float:
    """Resident memory, or with key 'VmHWM' its peak since `reset_peak`, 1e6 B. Linux only."""
    status = Path("/proc/self/status").read_text()
    match = re.search(rf"{key}:\s+(\d+) kB", status)
    assert match, f"/proc/self/status has no {key}"
    return int(match[1]) * 1024 / 1e6


def reset_peak() -> None:
    """Resets VmHWM to the current resident memory."""
    Path("/proc/self/clear_refs").write_text("5")


def watch_models(meter: Meter) -> None:
    """Wraps methods of transformers, diffusers and this project's replacements, so that every setup
    has the same spans (tower, VAE), and counts token positions. Calls inside sampling are
    ignored."""
    from diffusers import AutoencoderKLQwenImage
    from transformers import Qwen2VLImageProcessorPil
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen

    from rl.renderers.qwen_image_loop import FrameVae

    def note(*_: Any, inputs_embeds: Any, **__: Any) -> None:
        meter.positions += int(inputs_embeds.shape[0] * inputs_embeds.shape[1])

    for owner, name, label in (
        (AutoencoderKLQwenImage, "encode", VAE_ENCODE),
        (AutoencoderKLQwenImage, "decode", VAE_DECODE),
        (FrameVae, "encode", VAE_ENCODE),
        (FrameVae, "decode", VAE_DECODE),
        (qwen.Qwen2_5_VisionTransformerPretrainedModel, "forward", TOWER),
        (Qwen2VLImageProcessorPil, "preprocess", POLICY),
    ):
        meter.watch(owner, name, label, SAMPLING)
    meter.watch(qwen.Qwen2_5_VLTextModel, "forward", POLICY, SAMPLING, note)
