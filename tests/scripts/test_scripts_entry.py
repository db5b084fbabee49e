"""`rl <command>`: it leads to the command's module, and says what is missing before it tries."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest
from tiny_messages import names

from rl.__main__ import COMMANDS, DISTRIBUTION, main

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "vllm", "diffusers", "deepspeed", "transformers", "peft", "datasets", "wandb")


def rl(*words: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rl", *words],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


class Said(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def rl_here(monkeypatch, capsys) -> Callable[..., Said]:
    """`rl` in this process, which runs the module that it would become."""

    def become(_: str, words: list[str]) -> None:
        words = words[words.index("-m") + 1 :]
        sys.argv = words
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)

    def run(*words: str) -> Said:
        with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
            for name in ("stdout", "stderr"):
                patch.setattr(sys, name, getattr(sys, name))  # a command guards them
            patch.setattr(sys, "argv", ["rl", *words])
            patch.setattr(os, "execv", become)
            main()
        return Said(int(ended.value.code or 0), *capsys.readouterr())

    return run


def test_check_needs_no_torch(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "from importlib.machinery import PathFinder\n"
        "find = PathFinder.find_spec\n"
        "PathFinder.find_spec = lambda name, path=None, target=None: (\n"
        f"    None if name in {HEAVY!r} else find(name, path, target))\n"
    )
    path = f"{tmp_path}:{ROOT}"
    done = rl("check", "configs/quickstart.jsonnet", cwd=tmp_path, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("nothing is wrong\n")
    assert rl("check", "configs/quickstart.jsonnet", "seed=x").returncode == 1


def test_help_names_every_command_and_needs_nothing(rl_here: Callable[..., Said]) -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-S", ROOT / "rl" / "__main__.py", "--help"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and done.stderr == ""
    named = re.findall(r"^  ([\w-]+)  ", done.stdout, re.MULTILINE)
    assert named == list(COMMANDS)
    assert rl_here().stdout == rl_here("-h").stdout == done.stdout


def test_an_unknown_command_is_told_the_nearest(rl_here: Callable[..., Said]) -> None:
    done = rl_here("chek", "configs/quickstart.jsonnet")
    assert done.returncode == 2
    assert names(done.stderr, "'chek' ... 'check' ... rl --help")
    unlike = rl_here("xyz").stderr
    assert names(unlike, "'xyz' ... rl --help") and "did you mean" not in unlike


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_helps_itself(name: str, rl_here: Callable[..., Said]) -> None:
    done = rl_here(name, "--help")
    assert done.returncode == 0, done.stderr
    called = {"enhance": "rl edit"}.get(name, f"rl {name}")
    called = "python -m rl.simple_launch" if "launch" in COMMANDS[name].module else called
    assert done.stdout.startswith(f"usage: {called} ")


@pytest.mark.slow
@pytest.mark.parametrize("command", [["rl", "report"], ["rl", "runs"], ["rl.commands.report"]])
def test_nothing_is_imported_from_a_run_folder_that_one_looks_at(
    command: list[str], tmp_path: Path
) -> None:
    """Also where PYTHONPATH names the working folder; `python -m` itself imports some of the
    standard library from there before any line of ours."""
    modules = ["PIL", "numpy", "jinja2", "pydantic", "markupsafe", "argparse", "json", "difflib"]
    modules += ["contextlib", "inspect", "rl", "usercustomize"] if command[0] == "rl" else []
    for name in modules:
        (tmp_path / f"{name}.py").write_text(
            f"open({str(tmp_path / 'ran')!r}, 'a').write('{name}')"
        )
    (tmp_path / "config.json").write_text('{"format": 3}')
    rows = [f'{{"iteration": {n}, "reward/mean": 0.5}}\n' for n in range(3)]
    (tmp_path / "metrics.jsonl").write_text("".join(rows))
    path = f"{ROOT}:" if command[0] != "rl" else str(ROOT)
    safe = ["-P"] if command[0] == "rl" else []
    done = subprocess.run(
        [sys.executable, *safe, "-m", *command, "."],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text()
    assert command[-1] == "runs" or (tmp_path / "report/index.html").is_file()


def test_what_needs_torch_says_so_first(rl_here: Callable[..., Said], monkeypatch) -> None:
    found = lambda name: None if name in HEAVY else find_spec(name)  # noqa: E731
    monkeypatch.setattr("rl.__main__.find_spec", found)
    for name, command in COMMANDS.items():
        if command.needs_torch:
            done = rl_here(name, "--help")
            assert done.returncode == 1
            assert names(done.stderr, f"rl {name}: torch ... '{DISTRIBUTION}[cuda]'")


def test_a_plugin_lies_in_the_folder_where_the_run_is_started(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    shutil.copy(ROOT / "tests" / "brightness_reward.py", tmp_path / "mine" / "my_reward.py")
    reward = "rewards={mine: {type: 'mine.my_reward'}}"
    done = rl("check", "configs/quickstart.jsonnet", reward, cwd=tmp_path)
    assert done.returncode == 0 and "mine.my_reward" in done.stdout, done.stdout + done.stderr


def test_a_folder_without_the_clones_packages(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "rl", tmp_path / "rl", ignore=shutil.ignore_patterns("weights"))
    done = subprocess.run(
        # -S: an editable installation of the clone would lend its packages.
        [sys.executable, "-S", "-m", "rl", "bench-gpu"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert names(done.stderr, "rl bench-gpu: ... benchmarks/ ... clone")


@pytest.mark.parametrize("script", sorted((ROOT / "scripts").glob("*.py")), ids=lambda p: p.name)
def test_a_clones_script_is_the_commands_two_lines(script: Path) -> None:
    [importing, running] = [line for line in script.read_text().splitlines() if line]
    module = re.fullmatch(r"from ([\w.]+) import main", importing)
    assert module and running == "raise SystemExit(main())"
    modules = {command.module for command in COMMANDS.values()} | {"rl.commands.check_distributed"}
    assert module[1].removesuffix(".__main__") in modules and find_spec(module[1])


def test_an_unsupported_python_is_a_sentence() -> None:
    found = [name for name in ("python3.9", "python3.10", "python3.14") if shutil.which(name)]
    for name in found:
        for module in ("rl", "rl.simple_launch"):
            done = subprocess.run(
                [name, "-m", module, "--help"], cwd=ROOT, capture_output=True, text=True
            )
            if "command not found" in done.stderr:  # a version manager's empty promise
                continue
            assert done.returncode == 1
            assert names(done.stderr, "3.11.4 to 3.13 ... this is 3."), done.stderr


def test_the_package_installs_this_command() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == DISTRIBUTION
    assert project["scripts"] == {"rl": "rl.__main__:main"}
    assert project["requires-python"] == ">=3.11.4,<3.14"
