"""What `rl check-gpu` prints for planted faults, and what leaves it in the report."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny_config
from tiny_messages import code_of, holds
from tiny_programs import installed, write_programs
from tiny_waits import is_gone, wait_for

from benchmarks.bench_gpu import CASES
from rl.check import check_report, this_machine
from rl.config.schema import load_config
from rl.ranks.dist import Machine
from rl.tools import gpu_checks
from rl.tools.commands import check_gpu
from rl.tools.gpu_checks import Line, Setup, Step, result, shareable

TESTS = Path(__file__).resolve().parents[1]
CHILDREN_PATH = f"{TESTS / 'helpers'}:{TESTS.parent}"
H100 = "0, GPU-1, NVIDIA H100 80GB HBM3, 580.65.06, 9.0, 81559, 12"
Smi = Callable[..., None]


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Smi:
    """A machine whose nvidia-smi answers so, and that has no other program."""

    def make(*gpus: str, processes: str = "", code: int = 0) -> None:
        answer = "\n".join(gpus)
        cases = f"case $1 in *apps*) echo '{processes}';; *) echo '{answer}';; esac"
        script = f"#!/bin/sh\n{cases}\nexit {code}\n"
        monkeypatch.setenv("PATH", write_programs(tmp_path / "bin", {"nvidia-smi": script}))
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
        (H100.replace("580.65.06", "535.1"), "", "FAIL ... 535.1 ... fix: ... 580"),
        (H100.replace("81559", "8192"), "", "FAIL ... GPU 0: 8.6 GB ... fix: ... 16 GB"),
        (H100.replace(" 12", " 42000"), "4711", "FAIL ... GPU 0 ... 44.0 GB ... 4711 ... fix: end"),
    ],
)
def test_gpus_by_nvidia_smi(
    smi: Smi, gpu: str, processes: str, parts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(this_machine, "version", lambda name: "2.13.0")
    smi(gpu, processes=processes)
    found, why = this_machine.gpus()
    assert not why
    assert holds(told(*check_gpu.driver(found), check_gpu.gpu_memory(found[0])), parts)


def test_no_compiler(smi: Smi, monkeypatch: pytest.MonkeyPatch) -> None:
    smi(H100)
    monkeypatch.setattr(check_gpu, "pytorch", lambda num_gpus: [])
    machine = check_gpu.machine(Setup(".", "."))
    assert holds(told(*machine), "FAIL ... compiler ... gcc, clang ... fix: apt install build-ess")
    assert holds(told(*check_gpu.machine(Setup(".", ".", tiny=True))), "SKIPPED ... compiler")


def test_little_shared_memory_and_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    full = SimpleNamespace(total=64e6, free=64e6)
    monkeypatch.setattr("shutil.disk_usage", lambda place: full)
    setup = Setup(".", ".", tiny=True, num_gpus=2)
    shared = "FAIL ... /dev/shm: ... 0.064 GB ... fix: ... --shm-size"
    disk = "FAIL ... disk: 0.064 GB ... fix: make room, or set TMPDIR"
    assert holds(told(*check_gpu.machine(setup)), f"{shared} ... {disk}")
    assert holds(told(*check_gpu.machine(replace(setup, num_gpus=1))), "PASS ... /dev/shm")


def test_versions_that_were_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    version = installed({"transformers": "5.17.0", "torch": "2.11.0+cu130"})
    monkeypatch.setattr(importlib.metadata, "version", version)
    torch, transformers = check_gpu.versions()
    assert holds(told(torch), "PASS ... torch: 2.11.0+cu130; tried: 2.13.0, 2.11.0")
    fix = "FAIL ... transformers: 5.17.0 ... fix: pip install transformers==5.19.0"
    assert holds(told(transformers), fix)


def test_too_little_host_memory_for_the_configs_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in tiny_config.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(check_report, "machine_problems", lambda *_, **more: [])
    setup = Setup(".", ".", num_gpus=8, gpu_gb=80.0, config="configs/qwen_image_edit.jsonnet")
    for host_gb, parts in (
        (48.0, "FAIL ... config: host memory ... has 48.0 ... fix: "),
        (2000.0, "PASS ... config: fits"),
    ):
        monkeypatch.setattr(this_machine, "host_memory_gb", lambda gb=host_gb: gb)
        assert holds(told(*check_gpu.config_lines(setup)), parts)
    [line] = check_gpu.config_lines(replace(setup, config="configs/nothing.jsonnet"))
    assert line.status == "FAIL"


# Steps in child processes


def setup_in(folder: Path, **more: Any) -> Setup:
    (folder / "results.jsonl").touch()
    return Setup(str(folder), str(folder), **{"tiny": True} | more)


def step(function: str, limit_s: float = 600.0, name: str = "planted", **more: Any) -> Step:
    return Step(name, f"tiny_gpu_faults:{function}", limit_s, **more)


def lines_of(function: str, folder: Path) -> list[Line]:
    setup = setup_in(folder)
    [(name, _)] = gpu_checks.run([step(function)], setup, 600)
    return gpu_checks.results(setup, name)


@pytest.fixture(autouse=True)
def children_find_the_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", CHILDREN_PATH)


LIMITS = {"hanging": 6.0, "with_a_grandchild": 6.0, "killed": 60.0, "out_of_memory": 60.0,
          "noisy": 60.0}  # fmt: skip
"""Seconds of the steps that `children` runs; two at a time."""


@pytest.fixture(scope="module")
def children(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Line]]:
    """The lines of each."""
    setup = setup_in(tmp_path_factory.mktemp("children"))
    steps = [step(function, limit_s, function) for function, limit_s in LIMITS.items()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", CHILDREN_PATH)
        list(gpu_checks.run(steps, setup, 600))
    return {function: gpu_checks.results(setup, function) for function in LIMITS}


@pytest.mark.parametrize(
    ("function", "parts"),
    [
        ("killed", "FAIL ... killed: ended by SIGKILL ... fix: host memory"),
        ("hanging", "FAIL ... no end within 6 s, in hanging (tiny_gpu_faults.py ... fix: "),
        ("out_of_memory", "FAIL ... CUDA out of memory in place.py ... fix: end other"),
    ],
)
def test_a_child_that_does_not_end_well_is_a_line(
    children: dict[str, list[Line]], function: str, parts: str
) -> None:
    before, line = children[function]
    assert before == result("before it", True)
    assert holds(told(line), parts)


def test_what_libraries_print_is_no_line(children: dict[str, list[Line]]) -> None:
    assert children["noisy"] == [result("the only one", True)]


def test_the_deadline_ends_a_step_and_starts_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_checks, "MIN_START_S", 2.0)
    setup, start_s = setup_in(tmp_path), time.monotonic()
    functions = {"first": "quick", "long": "hanging", "never": "quick"}
    alone = [step(function, name=n, is_alone=True) for n, function in functions.items()]
    # On a CPU steps run side by side even so; with a GPU each of these waits for the one before.
    list(gpu_checks.run(alone, replace(setup, tiny=False), 5.0))
    assert 5 <= time.monotonic() - start_s < 9
    first, long, never = (gpu_checks.results(setup, name) for name in ("first", "long", "never"))
    assert [line.status for line in first] == ["MEASURED", "MEASURED"]
    assert long[-1].status == "NO TIME" and "cut off" in long[-1].note
    assert [line.status for line in never] == ["NO TIME"]


@pytest.mark.parametrize(
    ("is_alone", "gpu_gb", "overlap"),
    [(False, 16.0, True), (True, 16.0, False), (False, 6.0, False)],
)
def test_steps_run_side_by_side_where_memory_allows_it(
    tmp_path: Path, is_alone: bool, gpu_gb: float, overlap: bool
) -> None:
    setup = setup_in(tmp_path, tiny=False, num_gpus=1, gpu_gb=gpu_gb)
    steps = [step("quick", name=name, is_alone=is_alone, arguments=(name,)) for name in "ab"]
    list(gpu_checks.run(steps, setup, 60))
    (a, a_end), (b, _) = (gpu_checks.results(setup, name) for name in "ab")
    assert (a.note, b.note) == ("a", "b")
    assert (b.data["at_s"] < a_end.data["at_s"]) == overlap


def test_what_a_killed_step_started_is_gone(children: dict[str, list[Line]]) -> None:
    measured, line = children["with_a_grandchild"]
    assert "no end within" in line.note
    wait_for(lambda: is_gone(int(measured.data["pid"])))


def test_results_are_on_the_disk_after_kill_9_of_the_whole(tmp_path: Path) -> None:
    code = "from test_check_gpu import *; from pathlib import Path; "
    code += f"list(gpu_checks.run([step('hanging')], setup_in(Path({str(tmp_path)!r})), 60))"
    with subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parent) as process:
        wait_for(lambda: gpu_checks.results(setup_in(tmp_path), "planted"))
        [child] = gpu_checks.descendants(process.pid)
        process.kill()
    assert gpu_checks.results(setup_in(tmp_path), "planted") == [result("before it", True)]
    wait_for(lambda: is_gone(child))


@pytest.mark.parametrize("num_gpus", [1, 8])
def test_the_loops_on_gpus_are_runs_that_rl_check_accepts(tmp_path: Path, num_gpus: int) -> None:
    """Only a machine with GPUs can start them; what a config gets wrong shows here."""
    setup = setup_in(tmp_path, tiny=False, num_gpus=num_gpus, gpu_gb=85.5)
    machine = Machine((85.5,) * num_gpus)
    loops = [one for one in check_gpu.STEPS if one.function == check_gpu.LOOP]
    assert len(loops) == 7
    for one in loops:
        path, *words = check_gpu.words_of(setup, *one.arguments)
        config = load_config(path, words)
        assert config.policy["dtype"] == "bfloat16" and config.world_size == num_gpus
        assert check_report.problems(config) == [], one
        assert check_report.problems_here(config, machine, num_gpus, 128.0) == [], one


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
    assert holds(told(*lines_of(function, tmp_path)), parts)


@pytest.mark.parametrize(
    ("more", "setup", "parts"),
    [
        ({"needs_gpu": True}, {}, "SKIPPED ... needs a GPU"),
        ({"needs_large_gpu": True}, {"tiny": False, "gpu_gb": 24.0}, "SKIPPED ... 80 GB ... 24"),
        ({"package": "no_such_package"}, {}, "FAIL ... no_such_package is not installed ... fix: "),
        ({"function": "no_such_package.file:step"}, {}, "SKIPPED ... clone"),
    ],
)
def test_steps_that_cannot_run_here_say_why(
    tmp_path: Path, more: dict[str, Any], setup: dict[str, Any], parts: str
) -> None:
    given = setup_in(tmp_path, **setup)
    [(_, seconds)] = gpu_checks.run([replace(step("killed"), **more)], given, 60)
    assert seconds == 0.0 or "function" in more
    assert holds(told(*gpu_checks.results(given, "planted")), parts)


# The end


def test_every_step_is_a_function_of_its_file() -> None:
    for one in [*check_gpu.STEPS, *CASES]:
        module, _, name = one.function.partition(":")
        text = (TESTS.parent / module.replace(".", "/")).with_suffix(".py").read_text()
        assert re.search(rf"^def {name}\(", text, re.MULTILINE), one


def test_recommended_keys_are_keys_of_a_config() -> None:
    words = {f"{key}={value}" for one in check_gpu.STEPS for key, value in one.keys.items()}
    for file in ("gpu_steps.py", "commands/check_gpu.py"):
        text = (TESTS.parent / "rl/tools" / file).read_text()
        words |= {"=".join(pair) for pair in re.findall(r'\{"(\w+\.\w+)": "(\w+)"\}', text)}
    assert len(words) >= 4
    for word in {*words, "gpu_gb=80", "world_size=8", "renderer.batch_size=2"}:
        tiny_config.shipped("quickstart", word)


def test_a_line_has_at_most_80_columns() -> None:
    text = Line("FAIL", "what " * 9, "why " * 40, "do this " * 30).text()
    assert max(map(len, text.split("\n"))) <= 80 and "\n         fix: do this" in text


def test_the_report_has_no_host_name_folder_or_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnop")
    monkeypatch.setattr(platform, "node", lambda: "alice-box")
    note = f"hf_abcdefghijklmnop on alice-box in {Path.home()}/x/run.log; /dev/shm"
    text = gpu_checks.report(
        "rl check-gpu, H100", {"a": (1.0, [result("b", False, note)])}, ["READY"]
    )
    assert "run.log" in text and "/dev/shm" in text and "H100" in text and "torch 2" in text
    for word in ("abcdefgh", "alice", "/x/", str(Path.home())):
        assert word not in text, word
    assert shareable("27.0 GB/s, 2.13.0+cpu") == "27.0 GB/s, 2.13.0+cpu"


def test_the_command_ends_with_a_table_a_verdict_keys_and_a_report(
    smi: Smi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    smi(H100, H100)
    broken = Line("FAIL", "PyTorch", "sees 0 of 2 GPUs", "install", {"engine.type": "transformers"})
    monkeypatch.setattr(gpu_checks, "results", lambda setup, name: [broken])
    monkeypatch.setattr(check_gpu, "STEPS", [step("quick", is_alone=True), *check_gpu.STEPS[1:2]])
    assert check_gpu.main(["--out", str(tmp_path / "new")]) == 1
    printed = capsys.readouterr().out
    assert holds(
        printed,
        "FAIL ... planted ... 1 FAIL ... kernels ... NOT READY (2 FAIL): fix 'PyTorch' first ... "
        "gpu_gb=85 ... world_size=2 ... engine.type=transformers ... report",
    )
    assert holds((tmp_path / "new" / "report.md").read_text(), "H100 ... FAIL ... NOT READY")
    rows = (tmp_path / "new" / "results.jsonl").read_text().splitlines()
    assert json.loads(rows[-1])["note"] == "see PyTorch"


def test_the_verdicts() -> None:
    passed, late = result("a", True), Line("NO TIME", "loop", "not started")
    assert gpu_checks.verdict({"a": (1.0, [passed])}) == "READY (1 PASS)"
    verdict = gpu_checks.verdict({"a": (1.0, [passed]), "loop": (0.0, [late])})
    assert holds(verdict, "CUT SHORT (1 PASS, 1 NO TIME) ... loop")
    assert gpu_checks.verdict({"a": (1.0, [late, result("b", False)])}).startswith("NOT READY")


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--steps", "kernel"], "did you mean 'kernels'?"),
        (["--engine", "transformers", "--steps", "vllm_sleep"], "there is no 'vllm_sleep'"),
        (["--limit", "0"], "--limit 0"),
        (["--out", __file__], "name a folder"),
        (["configs/quickstart.jsonnet", "polcy.dtype=float32"], "polcy"),
        (["configs/quickstart.jsonnet", "renderer.type=none"], "renderer"),
        (["configs/nothing.jsonnet"], "nothing"),
    ],
)
def test_a_mistake_is_refused_before_the_first_step(
    words: list[str], parts: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(gpu_checks, "run", lambda *_: pytest.fail("a step was started"))
    assert code_of(check_gpu.main, "--tiny", *words) in (1, 2)
    assert parts in capsys.readouterr().err
