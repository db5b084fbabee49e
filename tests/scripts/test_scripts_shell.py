"""The shell scripts: they parse, find the right Python, install once, select the right tests."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [*sorted((ROOT / "scripts").glob("*.sh")), ROOT / ".ci" / "run"]


@pytest.fixture
def copy(tmp_path):
    """The scripts in a folder of their own, in which every command they call can be replaced."""
    for name in ("scripts", ".ci"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("requirements.txt", "requirements-cpu.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "bin").mkdir()
    return tmp_path


def fake(path: Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)


def run(copy: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """In an environment where only `bin/` of the copy and the system's own tools are found."""
    plain = {
        key: value
        for key, value in os.environ.items()
        if key not in ("PYTHON", "REQUIREMENTS", "VIRTUAL_ENV")
    }
    path = f"{copy / 'bin'}:/usr/bin:/bin"
    return subprocess.run(
        ["bash", *command],
        cwd=copy,
        env={**plain, "PATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def installed(copy: Path, requirements: str = "requirements-cpu.txt") -> None:
    """A .venv that `_install.sh` takes for complete, whose tools only say how they were called."""
    with (copy / requirements).open() as lines:
        stamp = subprocess.run(["cksum"], stdin=lines, capture_output=True, text=True, check=True)
    for tool in ("python", "ruff", "mypy"):
        fake(copy / ".venv/bin" / tool, f'echo "{tool} $*"')
    (copy / ".venv/bin/activate").write_text(f'export PATH="{copy}/.venv/bin:$PATH"\n')
    (copy / ".venv/installed").write_text(f"{requirements} {stamp.stdout}")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse_are_strict_and_can_be_started(script):
    subprocess.run(["bash", "-n", script], check=True)
    text = script.read_text()
    assert text.startswith("#!/usr/bin/env bash\n") and "set -euo pipefail\n" in text
    assert os.access(script, os.X_OK)


def test_an_old_python_is_refused_with_a_remedy(copy):
    fake(copy / "bin/old", "[[ $1 == -V ]] && echo Python 3.9.2; exit 1")
    done = run(copy, "scripts/_install.sh", PYTHON="old")
    assert done.returncode != 0
    assert "No Python 3.11 or newer with venv and ensurepip was found" in done.stderr
    assert "apt install python3 python3-venv" in done.stderr
    assert not (copy / ".venv").exists()


@pytest.mark.parametrize("gpu", [False, True])
def test_the_machine_decides_what_is_installed_once(copy, gpu):
    fake(copy / "bin/nvidia-smi", "exit 0" if gpu else "exit 9")
    pip = 'echo "$*" >>"$CALLS"; [[ $* != *"show torch"* ]] || echo Version: 2.13.0+cpu'
    # What `python -m venv .venv` would make: a python that notes how pip was called.
    make_venv = f"""if [[ $1 == -m ]]; then
        mkdir -p .venv/bin && printf '#!/bin/bash\\n%s\\n' '{pip}' >.venv/bin/python
        chmod +x .venv/bin/python
    fi"""
    fake(copy / "bin/python3", make_venv)
    calls = copy / "calls"
    first = run(copy, "scripts/_install.sh", CALLS=str(calls))
    assert first.returncode == 0, first.stderr
    wanted = "requirements.txt" if gpu else "requirements-cpu.txt"
    assert calls.read_text().splitlines()[-1] == f"-m pip install --no-input -r {wanted}"
    calls.unlink()
    again = run(copy, "scripts/_install.sh", CALLS=str(calls))
    assert (again.returncode, again.stdout, calls.exists()) == (0, "", False)
    with (copy / wanted).open("a") as lines:
        lines.write("another==1.0\n")
    run(copy, "scripts/_install.sh", CALLS=str(calls))
    assert calls.exists()


def test_a_failed_installation_is_shown_and_tried_again(copy):
    fake(copy / "bin/python3", "mkdir -p .venv/bin; cp bin/broken .venv/bin/python 2>/dev/null; :")
    fake(copy / "bin/broken", "echo no matching distribution; exit 1")
    for _ in range(2):
        done = run(copy, "scripts/_install.sh")
        assert done.returncode == 1
        assert "no matching distribution" in done.stderr
        assert "the whole log is .venv/install.log" in done.stderr


def test_default_and_slow_tests(copy):
    installed(copy)
    settings = {"REQUIREMENTS": "requirements-cpu.txt"}
    default = run(copy, "scripts/test.sh", "-k", "a or b", **settings).stdout.splitlines()
    assert default == [
        "ruff check .",
        "ruff format --check .",
        "mypy ",
        "python -m pytest -m not slow -k a or b",
    ]
    everything = run(copy, "scripts/test.sh", "--all", "-x", **settings).stdout.splitlines()
    assert everything[-1] == "python -m pytest -x"
    assert run(copy, ".ci/run", **settings).stdout.splitlines()[-1] == "python -m pytest"


def test_a_lint_error_fails_the_test_script(copy):
    installed(copy)
    fake(copy / ".venv/bin/ruff", "exit 1")
    assert run(copy, "scripts/test.sh", REQUIREMENTS="requirements-cpu.txt").returncode == 1


def test_quickstart_runs_and_reports_the_same_run(copy):
    installed(copy)
    words = ["num_iterations=3", "--nproc", "2"]
    done = run(copy, "scripts/quickstart.sh", *words, REQUIREMENTS="requirements-cpu.txt")
    assert done.stdout.splitlines() == [
        "python -m rl.simple_launch configs/quickstart.jsonnet num_iterations=3 --nproc 2",
        "python scripts/report.py configs/quickstart.jsonnet num_iterations=3",
    ]
    plain = run(copy, "scripts/quickstart.sh", REQUIREMENTS="requirements-cpu.txt")
    assert plain.stdout.splitlines()[-1] == "python scripts/report.py configs/quickstart.jsonnet"
