"""What `rl check-gpu` prints for planted faults, and what leaves it in the report."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny_config
from tiny_messages import holds

from rl.check import check_report, this_machine
from rl.check_gpu import gpu_machine
from rl.check_gpu.lines import Asked, Line, result, shareable, skipped
from rl.check_gpu.steps import STEPS, Step, run_step
from rl.commands import check_gpu
from rl.config.schema import load_config

TESTS = Path(__file__).resolve().parents[1]
H100 = "0, GPU-1, NVIDIA H100 80GB HBM3, 580.65.06, 9.0, 81559, 12"
Smi = Callable[..., None]


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Smi:
    """A machine whose nvidia-smi answers so, and that has no other program."""

    def make(*gpus: str, processes: str = "", code: int = 0) -> None:
        file = tmp_path / "bin" / "nvidia-smi"
        file.parent.mkdir(exist_ok=True)
        answer = "\n".join(gpus)
        cases = f"case $1 in *apps*) echo '{processes}';; *) echo '{answer}';; esac"
        file.write_text(f"#!/bin/sh\n{cases}\nexit {code}\n")
        file.chmod(0o755)
        monkeypatch.setenv("PATH", str(file.parent))
        monkeypatch.delenv("CC", raising=False)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return make


def told(*lines: Line) -> str:
    """Without the breaks at 80 columns."""
    return " ".join(" ".join(line.text() for line in lines).split())


# The machine


def test_no_driver_is_one_line_that_says_what_to_type(
    smi: Smi, capsys: pytest.CaptureFixture[str]
) -> None:
    smi("NVIDIA-SMI has failed because it could not reach the NVIDIA driver", code=9)
    assert check_gpu.main([]) == 1
    out, err = capsys.readouterr()
    [line] = err.strip().split("\n")
    assert not out and holds(line, "no NVIDIA GPU ... NVIDIA-SMI has failed ... check-gpu --tiny")


@pytest.mark.parametrize(
    ("gpu", "processes", "parts"),
    [
        (H100, "", "PASS ... driver ... H100 ... PASS ... GPU 0: 85.5 GB, 0.0 GB"),
        (H100.replace("9.0", "7.5"), "", "FAIL ... driver ... 7.5 ... fix: ... 8.0"),
        (H100.replace("81559", "8192"), "", "FAIL ... GPU 0: 8.6 GB ... fix: ... 16 GB"),
        (H100.replace(" 12", " 42000"), "4711", "FAIL ... GPU 0 ... 44.0 GB ... 4711 ... fix: end"),
    ],
)
def test_gpus_by_nvidia_smi(smi: Smi, gpu: str, processes: str, parts: str) -> None:
    smi(gpu, processes=processes)
    found, why = this_machine.gpus()
    assert not why
    lines = [*gpu_machine.driver(found), gpu_machine.gpu_memory(found[0])]
    assert holds(told(*lines), parts)


def test_only_visible_gpus_are_looked_at(smi: Smi, monkeypatch: pytest.MonkeyPatch) -> None:
    smi(H100, H100.replace("0, GPU-1", "1, GPU-2"))
    for visible, numbers in {"1": "1", "GPU-1,GPU-2": "01", "MIG-1": "01", "": ""}.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert "".join(gpu.number for gpu in this_machine.gpus()[0]) == numbers


def test_an_old_driver(smi: Smi, monkeypatch: pytest.MonkeyPatch) -> None:
    smi(H100.replace("580.65.06", "535.1"))
    monkeypatch.setattr(this_machine, "version", lambda name: "2.13.0")
    [line] = gpu_machine.driver(this_machine.gpus()[0])
    assert holds(told(line), "FAIL ... 535.1 ... fix: ... 580")


def test_no_compiler(smi: Smi, monkeypatch: pytest.MonkeyPatch) -> None:
    smi(H100)
    monkeypatch.setattr(gpu_machine, "pytorch", lambda num_gpus: [])
    lines = told(*gpu_machine.machine(Asked(".")))
    assert holds(lines, "FAIL ... compiler ... gcc, clang ... fix: apt install build-ess")
    assert holds(told(*gpu_machine.machine(Asked(".", tiny=True))), "SKIPPED ... compiler")


def test_little_shared_memory_and_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    full = SimpleNamespace(total=64e6, free=64e6)
    monkeypatch.setattr("shutil.disk_usage", lambda place: full)
    lines = told(*gpu_machine.machine(Asked(".", tiny=True, num_gpus=2)))
    shared = "FAIL ... /dev/shm: ... 0.064 GB ... fix: ... --shm-size"
    assert holds(lines, f"{shared} ... FAIL ... disk: 0.064 GB ... fix: make room, or set TMPDIR")
    assert holds(told(*gpu_machine.machine(Asked(".", tiny=True, num_gpus=1))), "PASS ... /dev/shm")


def test_too_little_host_memory_for_the_configs_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in tiny_config.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(check_report, "machine_problems", lambda *_, **more: [])
    monkeypatch.setattr(this_machine, "host_memory_gb", lambda: 48.0)
    asked = Asked(".", num_gpus=8, gpu_gb=80.0, config="configs/qwen_image_edit.jsonnet")
    [line] = gpu_machine.config_lines(asked)
    assert holds(told(line), "FAIL ... config: host memory ... has 48.0 ... fix: ")
    monkeypatch.setattr(this_machine, "host_memory_gb", lambda: 2000.0)
    assert holds(told(*gpu_machine.config_lines(asked)), "PASS ... config: fits")
    [line] = gpu_machine.config_lines(replace(asked, config="configs/nothing.jsonnet"))
    assert line.status == "FAIL"


# Steps in child processes


def lines_of(function: str, folder: Path, limit_s: float = 600.0, **more: object) -> list[Line]:
    step = Step("planted", f"tiny_gpu_faults:{function}", limit_s, **more)  # type: ignore[arg-type]
    return list(run_step(step, Asked(str(folder), tiny=True)))


@pytest.fixture(autouse=True)
def children_find_the_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), str(TESTS.parent)]))


@pytest.mark.parametrize(
    ("function", "limit_s", "parts"),
    [
        ("killed", 60.0, "FAIL ... planted: ended by SIGKILL ... fix: host memory"),
        ("hanging", 3.0, "FAIL ... no end within 3 s, in hanging (tiny_gpu_faults.py ... fix: "),
        ("out_of_memory", 60.0, "FAIL ... CUDA out of memory in place.py ... fix: end other"),
    ],
)
def test_a_child_that_does_not_end_well_is_a_line(
    tmp_path: Path, function: str, limit_s: float, parts: str
) -> None:
    before, line = lines_of(function, tmp_path, limit_s)
    assert before == result("before it", True)
    assert holds(told(line), parts)


def test_what_libraries_print_is_no_line(tmp_path: Path) -> None:
    assert lines_of("noisy", tmp_path) == [result("the only one", True)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "parts"),
    [
        ("wrong_kernel", "FAIL ... (auto) ... 1.0100 ... fix: set policy.attn_implementation=sdpa"),
        ("dead_sync", "FAIL ... weight sync: after the weight sync ... fix: set engine.type=tran"),
        ("rank_that_never_joins", "FAIL ... sum ... rank 0 waited 2 s ... fix: NCCL_DEBUG=INFO"),
        ("loop_that_cannot_resume", "PASS ... started ... FAIL ... resumed: ... another config"),
    ],
)
def test_planted_faults(tmp_path: Path, function: str, parts: str) -> None:
    lines = lines_of(function, tmp_path)
    print(told(*lines))
    assert holds(told(*lines), parts)


def test_steps_that_cannot_run_here_are_skipped(tmp_path: Path) -> None:
    [line] = lines_of("killed", tmp_path, needs_gb=78.0)
    assert line == skipped("planted")
    large = Step("large", "tiny_gpu_faults:killed", 60, needs_gb=78)
    [line] = run_step(large, Asked(str(tmp_path), num_gpus=1, gpu_gb=24.0))
    assert holds(told(line), "SKIPPED ... 80 GB ... 24")
    [line] = run_step(Step("gone", "no_such_room.file:step", 60), Asked(str(tmp_path), tiny=True))
    assert holds(told(line), "SKIPPED ... clone")


# The end


def test_every_step_is_a_function_of_its_file() -> None:
    for step in STEPS:
        module, _, name = step.function.partition(":")
        text = (TESTS.parent / module.replace(".", "/")).with_suffix(".py").read_text()
        assert re.search(rf"^(def {name}\(|{name} = partial)", text, re.MULTILINE), step


def test_recommended_keys_are_keys_of_a_config() -> None:
    words = [f"{key}={value}" for step in STEPS for key, value in step.keys.items()]
    text = "".join(file.read_text() for file in (TESTS.parent / "rl/check_gpu").glob("gpu_*.py"))
    words += [f"{key}={value}" for key, value in re.findall(r'\{"(\w+\.\w+)": "(\w+)"\}', text)]
    assert len(set(words)) >= 4
    for word in {*words, "gpu_gb=80", "world_size=8", "renderer.batch_size=2"}:
        load_config("configs/quickstart.jsonnet", [word])


def test_a_line_has_at_most_80_columns() -> None:
    text = Line("FAIL", "what " * 9, "why " * 40, "do this " * 30).text()
    assert max(map(len, text.split("\n"))) <= 80 and "\n         fix: do this" in text


def test_the_report_has_no_host_name_folder_or_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnop")
    monkeypatch.setattr(platform, "node", lambda: "alice-box")
    note = f"hf_abcdefghijklmnop on alice-box in {Path.home()}/x/run.log; /dev/shm"
    text = check_gpu.report(["rl check-gpu", "H100"], [("a", 1.0, [result("b", False, note)])])
    assert "run.log" in text and "/dev/shm" in text and "H100" in text and "torch 2" in text
    for word in ("abcdefgh", "alice", "/x/", str(Path.home())):
        assert word not in text, word
    assert shareable("27.0 GB/s, 2.13.0+cpu") == "27.0 GB/s, 2.13.0+cpu"


def test_the_command_ends_with_a_verdict_keys_and_a_report(
    smi: Smi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    smi(H100, H100)
    broken = Line("FAIL", "PyTorch", "sees 0 of 2 GPUs", "install", {"engine.type": "transformers"})
    monkeypatch.setattr(check_gpu, "run_step", lambda step, asked: [broken])
    monkeypatch.setattr(check_gpu, "STEPS", STEPS[:2])
    out = tmp_path / "report.md"
    assert check_gpu.main(["--out", str(out)]) == 1
    printed = capsys.readouterr().out
    assert holds(
        printed,
        "FAIL ... SKIPPED ... packed attention: see PyTorch ... NOT READY (1 FAIL, 1 SKIPPED): fix "
        "'PyTorch' first ... gpu_gb=85 ... world_size=2 ... engine.type=transformers ... report",
    )
    assert holds(out.read_text(), "# rl check-gpu ... GPUs: NVIDIA H100 ... FAIL ... NOT READY")
