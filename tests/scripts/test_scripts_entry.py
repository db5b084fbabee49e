"""`rl COMMAND` runs the command's module, and reports missing packages before it does."""

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

import pytest
from tiny_config import REPO
from tiny_messages import holds

from rl.__main__ import COMMANDS, DISTRIBUTION, main

HEAVY = ("torch", "vllm", "diffusers", "deepspeed", "transformers", "peft", "datasets", "wandb")


Finished = subprocess.CompletedProcess[str]


def python(*arguments: str, cwd: Path = REPO, **environment: str) -> Finished:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(REPO), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def rl_here(monkeypatch, capsys) -> Callable[..., Finished]:
    """Runs `rl` in this process: runs the command's module instead of `os.execv`."""

    def run_module(_: str, arguments: list[str]) -> None:
        sys.argv = arguments[arguments.index("-m") + 1 :]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)

    def run(*arguments: str) -> Finished:
        with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
            for name in ("stdout", "stderr"):
                patch.setattr(sys, name, getattr(sys, name))  # restores what a command replaces
            patch.setattr(sys, "argv", ["rl", *arguments])
            patch.setattr(os, "execv", run_module)
            main()
        code, (out, err) = ended.value.code, capsys.readouterr()
        said = code if isinstance(code, str) else ""
        return Finished(arguments, bool(said) or code or 0, out, err + said)

    return run


@pytest.mark.slow
def test_check_needs_no_torch(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "from importlib.machinery import PathFinder\n"
        "find = PathFinder.find_spec\n"
        "PathFinder.find_spec = lambda name, path=None, target=None: (\n"
        f"    None if name in {HEAVY!r} else find(name, path, target))\n"
    )
    path = f"{tmp_path}:{REPO}"
    done = python("-m", "rl", "check", "configs/quickstart.jsonnet", cwd=tmp_path, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("nothing is wrong\n")
    assert python("-m", "rl", "check", "configs/quickstart.jsonnet", "seed=x").returncode == 1


def test_help_lists_every_command_and_needs_no_packages(rl_here: Callable[..., Finished]) -> None:
    done = python("-I", "-S", "rl/__main__.py", "--help")
    assert done.returncode == 0 and done.stderr == ""
    assert re.findall(r"^  ([\w-]+)  ", done.stdout, re.MULTILINE) == list(COMMANDS)
    assert rl_here().stdout == rl_here("-h").stdout == done.stdout


def test_an_unknown_command_is_an_error(rl_here: Callable[..., Finished]) -> None:
    done = rl_here("chek", "configs/quickstart.jsonnet")
    assert done.returncode == 2
    assert holds(done.stderr, "'chek' ... 'check' ... rl --help")
    unlike = rl_here("xyz").stderr
    assert holds(unlike, "'xyz' ... rl --help") and "did you mean" not in unlike


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(
    name: str, rl_here: Callable[..., Finished]
) -> None:
    done = rl_here("help", name)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: rl {name} ")
    assert re.search(f"^    rl {name}", done.stdout, re.MULTILINE)
    takes_overrides = "key=value" in done.stdout.partition("\n\n")[0]
    assert takes_overrides == ("the value: Jsonnet; other text: a string" in done.stdout)
    assert max(map(len, done.stdout.split("\n"))) <= 80


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", [["rl", "report"], ["rl", "runs"], ["rl.tools.commands.report"]]
)
def test_no_command_imports_from_a_run_folder_that_it_reads(
    command: list[str], tmp_path: Path
) -> None:
    """Also if PYTHONPATH names the working folder. (`python -m` imports some of the standard
    library from there before any line of this project runs.)"""
    modules = ["PIL", "numpy", "jinja2", "pydantic", "markupsafe", "argparse", "json", "difflib"]
    modules += ["contextlib", "inspect", "rl", "usercustomize"] if command[0] == "rl" else []
    for name in modules:
        (tmp_path / f"{name}.py").write_text(
            f"open({str(tmp_path / 'ran')!r}, 'a').write('{name}')"
        )
    (tmp_path / "config.json").write_text('{"format": 3}')
    rows = [f'{{"iteration": {n}, "reward/mean": 0.5}}\n' for n in range(3)]
    (tmp_path / "metrics.jsonl").write_text("".join(rows))
    path, safe = (str(REPO), ["-P"]) if command[0] == "rl" else (f"{REPO}:", [])
    done = python(*safe, "-m", *command, ".", cwd=tmp_path, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text()
    assert command[-1] == "runs" or (tmp_path / "report/index.html").is_file()


def test_missing_torch_is_an_error(rl_here: Callable[..., Finished], monkeypatch) -> None:
    find = lambda name: None if name in HEAVY else find_spec(name)  # noqa: E731
    monkeypatch.setattr("rl.__main__.find_spec", find)
    for name, command in COMMANDS.items():
        if command.needs_torch:
            done = rl_here(name, "--help")
            assert done.returncode == 1
            assert holds(done.stderr, f"rl {name}: torch ... '{DISTRIBUTION}[cuda]'")


@pytest.mark.slow
def test_plugins_are_imported_from_the_working_folder(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    shutil.copy(REPO / "tests/helpers/brightness_reward.py", tmp_path / "mine" / "my_reward.py")
    reward = "rewards={mine: {type: 'mine.my_reward'}}"
    done = python("-m", "rl", "check", "configs/quickstart.jsonnet", reward, cwd=tmp_path)
    assert done.returncode == 0 and "mine.my_reward" in done.stdout, done.stdout + done.stderr


def test_a_command_that_needs_the_clone_is_an_error_outside_it(tmp_path: Path) -> None:
    shutil.copytree(REPO / "rl", tmp_path / "rl", ignore=shutil.ignore_patterns("weights"))
    # -S: otherwise an editable installation of the clone would provide its packages.
    done = python("-S", "-m", "rl", "bench-gpu", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert holds(done.stderr, "rl bench-gpu: ... benchmarks/ ... clone")


@pytest.mark.slow
def test_an_unsupported_python_is_a_clear_error() -> None:
    pythons = [name for name in ("python3.9", "python3.10", "python3.14") if shutil.which(name)]
    for name in pythons:
        for module in ("rl", "rl.simple_launch"):
            done = subprocess.run(
                [name, "-m", module, "--help"], cwd=REPO, capture_output=True, text=True
            )
            if "command not found" in done.stderr:  # a version manager's stub without a Python
                continue
            assert done.returncode == 1
            assert holds(done.stderr, "3.11.4 to 3.13 ... this is 3."), done.stderr


def test_the_package_installs_the_rl_command() -> None:
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    assert project["name"] == DISTRIBUTION
    assert project["scripts"] == {"rl": "rl.__main__:main"}
    assert project["requires-python"] == ">=3.11.4,<3.14"
