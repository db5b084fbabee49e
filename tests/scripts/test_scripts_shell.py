"""The shell scripts parse, choose the right Python, install once and select the right tests."""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import tomllib
from pathlib import Path

import conftest
import pytest
from tiny_messages import holds

ROOT = Path(__file__).resolve().parents[2]
CPU, GPU, TEST = LOCKS = ("requirements-cpu.lock", "requirements.lock", "requirements-test.lock")
SCRIPTS = [*sorted((ROOT / "scripts").glob("*.sh")), ROOT / ".ci" / "run"]


@pytest.fixture
def copy(tmp_path):
    """A copy of the scripts in a folder where every command that they call can be replaced."""
    for name in ("scripts", ".ci"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", *LOCKS):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "bin").mkdir()
    return tmp_path


def fake(path: Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)


def run(copy: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a command with only `bin/` of the copy and the system's tools on PATH."""
    kept = {
        key: value
        for key, value in os.environ.items()
        if key not in ("PYTHON", "REQUIREMENTS", "VIRTUAL_ENV")
    }
    path = f"{copy / 'bin'}:/usr/bin:/bin"
    return subprocess.run(
        ["bash", *command],
        cwd=copy,
        env={**kept, "PATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def make_venv(copy: Path) -> None:
    """Makes a .venv that `_install.sh` takes for complete; its tools only print their arguments."""
    for tool in ("python", "ruff", "mypy", "bandit", "detect-secrets-hook"):
        fake(copy / ".venv/bin" / tool, f'echo "{tool} $*"')
    (copy / ".venv/bin/activate").write_text(f'export PATH="{copy}/.venv/bin:$PATH"\n')
    for lock in LOCKS:
        stamp = f'echo "{lock} $(cat {lock} pyproject.toml | cksum)" >>.venv/installed'
        subprocess.run(stamp, shell=True, cwd=copy, check=True)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse_and_are_strict_and_executable(script):
    subprocess.run(["bash", "-n", script], check=True)
    text = script.read_text()
    assert text.startswith("#!/usr/bin/env bash\n") and "set -euo pipefail\n" in text
    assert os.access(script, os.X_OK)


def test_an_old_python_or_venv_is_refused_with_a_fix(copy):
    fake(copy / "bin/old", "[[ $1 == -V ]] && echo Python 3.9.2; exit 1")
    done = run(copy, "scripts/_install.sh", PYTHON="old")
    assert done.returncode == 1
    parts = "3.11.4 to 3.13 ... venv ... ensurepip ... Python 3.9.2 ... apt install python3-venv"
    assert holds(done.stderr, parts.replace("install ", "install python3 ") + " ... PYTHON=")
    assert not (copy / ".venv").exists()
    (copy / ".venv/bin").mkdir(parents=True)
    (copy / "bin/old").rename(copy / ".venv/bin/python")
    done = run(copy, "scripts/_install.sh")
    assert done.returncode == 1
    assert holds(done.stderr, "Python 3.9.2 ... 3.11.4 to 3.13 ... delete .venv")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "fits"), [("3, 11, 3", 0), ("3, 11, 4", 1), ("3, 14, 0", 0)])
def test_python_versions_outside_the_range_are_refused(copy, number, fits):
    """The unchanged check runs on a Python that reports another version."""
    check = f"import sys; sys.version_info = ({number}); exec(sys.argv[1])"
    python = f'[[ $1 != -c ]] || exec {sys.executable} -c "{check}" "$2"; echo "made $*"; exit 3'
    fake(copy / "bin/other", python)
    done = run(copy, "scripts/_install.sh", PYTHON="other", REQUIREMENTS=CPU)
    assert ("No Python 3.11.4" in done.stderr) is not bool(fits)
    assert ("made -m venv .venv" in done.stderr) is bool(fits)


@pytest.mark.parametrize(
    ("system", "machine", "libc", "sentence"),
    [
        ("Darwin", "arm64", "", "here is Darwin on arm64"),
        ("Linux", "aarch64", "glibc 2.36", "here is Linux on aarch64"),
        ("MINGW64_NT-10.0", "x86_64", "", "here is MINGW64_NT-10.0 on x86_64"),
        ("Linux", "x86_64", "glibc 2.28", "glibc 2.31 or newer"),
        ("Linux", "x86_64", "", "here is: none"),
        ("Linux", "x86_64", "glibc 2.31", ""),
        ("Linux", "x86_64", "glibc 2.100", ""),
    ],
)
def test_an_unsupported_platform_is_refused_before_anything_is_installed(
    copy, system, machine, libc, sentence
):
    fake(copy / "bin/uname", f"[[ $1 == -s ]] && echo {system} || echo {machine}")
    fake(copy / "bin/getconf", f"echo {libc}; [[ -n '{libc}' ]]")
    done = run(copy, "scripts/_install.sh", PYTHON="no-such-python")
    assert done.returncode == 1 and not (copy / ".venv").exists()
    if sentence:
        assert sentence in done.stderr and len(done.stderr.splitlines()) == 1
    else:
        assert done.stderr.startswith("No Python 3.11.4")


VENV = """[[ $1 != -c ]] || exec {python} "$@"
mkdir -p .venv/bin && cp bin/venv-python .venv/bin/python"""
"""A python3 that makes a .venv with `bin/venv-python` as its python."""
NOTES = """[[ $1 != -c ]] || exec {python} "$@"
arguments="$*"
echo "pip${{arguments#-m pip install --no-input --disable-pip-version-check}}" >>calls
[[ $* != *uv==* ]] || {uv}
site=.venv/lib/python3.11/site-packages
[[ $* != *torch==* ]] || {torch}
exit 0"""
"""That python: records pip's arguments, and does what a test says when uv or torch is installed."""
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
[TORCH] = [pin for pin in PROJECT["optional-dependencies"]["train"] if pin.startswith("torch==")]
[VISION] = [pin for pin in PROJECT["optional-dependencies"]["cpu"] if "torchvision" in pin]
HAS_CPU_BUILD = f"mkdir -p $site/{TORCH.replace('==', '-')}+cpu.dist-info"


def new_machine(copy: Path, uv: str = "exit 1", torch: str = HAS_CPU_BUILD) -> Path:
    """A machine without GPU and .venv; returns the file in which installers record their arguments.

    `uv`: what `pip install uv` does (default: it fails); `torch`: what `pip install torch` does.
    """
    python = sys.executable
    fake(copy / "bin/nvidia-smi", "exit 9")
    fake(copy / "bin/python3", VENV.format(python=python))
    fake(copy / "bin/venv-python", NOTES.format(python=python, uv=uv, torch=torch))
    return copy / "calls"


INDEX = "--index-url https://download.pytorch.org/whl/cpu"
WITH_UV = "cp bin/uv .venv/bin/uv"
UV = 'all="$*"; echo "uv${all#pip install --python .venv/bin/python}" >>calls\n'


REFUSES_INDEX = "[[ $* != *--index-url* ]] || exit 1"
FROM_ELSEWHERE = f"{{ [[ $* != *--index-url* ]] && {HAS_CPU_BUILD}; }} || exit 1"
SITE = "site=.venv/lib/python3.11/site-packages\n"
LOCKED, LOCAL = f"--no-deps --require-hashes -r {CPU}", "--no-deps -e ."
FROM_INDEX = f"pip --no-deps --timeout 15 --retries 1 {INDEX} {TORCH}+cpu {VISION}+cpu"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("uv", "torch", "calls"),
    [
        (f"{UV}{SITE}[[ $* != *torch==* ]] || {HAS_CPU_BUILD}", HAS_CPU_BUILD,
         [f"uv --no-deps {INDEX} {TORCH}+cpu {VISION}+cpu", f"uv {LOCKED}", f"uv {LOCAL}"]),
        (f"{UV}exit 1", HAS_CPU_BUILD, [f"pip {LOCKED}", f"pip {LOCAL}"]),
        ("", FROM_ELSEWHERE, [FROM_INDEX, f"pip --no-deps --no-compile {TORCH}", f"pip {LOCKED}"]),
        ("", HAS_CPU_BUILD, [FROM_INDEX, f"pip {LOCKED}", f"pip {LOCAL}"]),
        ("", REFUSES_INDEX, [FROM_INDEX, f"pip --no-deps --no-compile {TORCH}", f"pip {TORCH}",
                             f"pip {LOCKED}"]),
    ],
    ids=["uv", "uv fails", "torch from another place", "no uv", "only torch for CUDA"],
)  # fmt: skip
def test_packages_are_installed_with_uv_or_pip_and_torch_from_its_index(copy, uv, torch, calls):
    log = new_machine(copy, uv=WITH_UV if uv else "exit 1", torch=torch)
    if uv:
        fake(copy / "bin/uv", uv)
    done = run(copy, "scripts/_install.sh")
    assert done.returncode == 0, done.stderr
    lines = log.read_text().splitlines()
    assert [line for line in lines if line in calls] == calls, lines
    assert ("PyTorch's CUDA build" in done.stdout) == (torch == REFUSES_INDEX)
    assert holds(done.stdout, f"{CPU} ... .venv/install.log ... installed")
    log.unlink()
    again = run(copy, "scripts/_install.sh")
    assert (again.returncode, again.stdout, log.exists()) == (0, "", False)


@pytest.mark.slow
def test_a_machine_with_a_gpu_installs_the_gpu_requirements_once(copy):
    calls = new_machine(copy)
    fake(copy / "bin/nvidia-smi", "exit 0")
    assert run(copy, "scripts/_install.sh").returncode == 0
    assert calls.read_text().splitlines()[1:] == [
        f"pip --no-deps --require-hashes -r {GPU}",
        "pip --no-deps -e .",
    ]
    for changed in (GPU, "pyproject.toml"):
        calls.unlink()
        with (copy / changed).open("a") as lines:
            lines.write("# another pin\n")
        run(copy, "scripts/_install.sh")
        assert f"-r {GPU}" in calls.read_text()


def test_builds_for_cpus_and_gpus_are_not_mixed(copy):
    make_venv(copy)
    stamps = copy / ".venv/installed"
    for present, other in ((CPU, GPU), (GPU, CPU)):
        stamps.write_text(f"{present} 1 2\n{TEST} 3 4\n")
        done = run(copy, "scripts/_install.sh", REQUIREMENTS=other)
        assert done.returncode == 1
        parts = f"{present} ... {other} ... delete .venv ... REQUIREMENTS={present}"
        assert holds(done.stderr, parts)


@pytest.mark.slow
@pytest.mark.parametrize(
    "installer",
    [
        pytest.param("{ : >started; exec sleep 60; }", id="dies"),
        pytest.param(
            "{ trap 'exit 1' INT; : >started; while :; do sleep 0.1; done; }", id="exits, as pip"
        ),
    ],
)
def test_no_process_outlives_a_stopped_installation(copy, installer):
    new_machine(copy, torch=installer)
    process = subprocess.Popen(
        ["bash", "scripts/_install.sh"],
        cwd=copy,
        env={**os.environ, "PATH": f"{copy / 'bin'}:/usr/bin:/bin"},
        stdout=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # nohup ignores it
    )
    while not (copy / "started").exists():
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=120)  # returns when no process has the pipe open
    assert process.returncode != 0


@pytest.mark.slow
def test_a_failed_installation_is_reported_and_tried_again(copy):
    new_machine(copy)
    fake(copy / "bin/venv-python", "[[ $1 == -c ]] || { echo no matching distribution; exit 1; }")
    for _ in range(2):
        done = run(copy, "scripts/_install.sh", REQUIREMENTS=GPU)
        assert done.returncode == 1
        assert holds(done.stderr, "no matching distribution ... .venv/install.log")
    missing = run(copy, "scripts/_install.sh", REQUIREMENTS="requirements-tpu.lock")
    assert missing.returncode == 1 and "no requirements-tpu.lock" in missing.stderr


PYTEST = "python -m pytest -n auto --dist worksteal --durations 20"


def test_each_tier_runs_its_tests(copy):
    make_venv(copy)

    def printed(*arguments):
        return run(copy, *arguments, REQUIREMENTS=CPU).stdout.splitlines()

    lint = ["ruff check .", "ruff format --check .", "mypy "]
    lint += ["bandit -q -ll -r rl tiny_world benchmarks scripts examples"]
    test = "scripts/test.sh"
    for options, tests in ((["-k", "a or b"], " -m not slow -k a or b"), (["--all", "-x"], " -x")):
        assert sorted(printed(test, *options)) == sorted([*lint, PYTEST + tests])
    assert printed(test, "--slow", "-x") == [f"{PYTEST} -m slow -x"]
    older = printed(test, "--other-cpus")
    assert [line.partition(" tests/")[0] for line in older] == [PYTEST] * 2
    fake(copy / "bin/chromium", "")
    lines = printed(".ci/run")
    assert [line for line in lines if line.startswith("python -m rl")] == lines[:2]
    tests = [line for line in lines if "pytest" in line]
    assert tests == [f"{PYTEST} -m not slow", f"{PYTEST} -m slow", *older]
    assert "all of it" in lines[-1]
    for tool in ("mypy", "ruff"):
        fake(copy / ".venv/bin" / tool, "exit 1")
        assert run(copy, test, REQUIREMENTS=CPU).returncode == 1
        fake(copy / ".venv/bin" / tool, "")
    fake(copy / ".venv/bin/python", "exit 5")
    assert run(copy, test, REQUIREMENTS=CPU).returncode == 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "selected"),
    [
        (["-m", "not slow"], ["quick"]),
        ([], ["quick", "slow"]),
        (["-k", "not slow"], ["quick"]),
        (["-m", "campaign"], ["campaign"]),
        (["-m", "campaign and slow"], []),
    ],
)
def test_campaign_tests_run_only_when_their_mark_is_selected(tmp_path, options, selected):
    (tmp_path / "test_tiers.py").write_text(
        "import pytest\n"
        "def test_quick(): pass\n"
        "@pytest.mark.slow\ndef test_slow(): pass\n"
        "@pytest.mark.campaign\ndef test_campaign(): pass\n"
    )
    collected = []

    class Notes:
        def pytest_collection_finish(self, session):
            collected.extend(item.name.removeprefix("test_") for item in session.items)

    quiet = ["--collect-only", "--capture=no", "--import-mode=importlib", "-p", "no:cacheprovider"]
    ours = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), "--noconftest"]
    pytest.main([*quiet, *ours, *options, str(tmp_path)], plugins=[conftest, Notes()])
    assert sorted(collected) == selected, "in any order"


def test_quickstart_runs_and_reports_the_same_run(copy):
    make_venv(copy)
    arguments = ["num_iterations=3", "--nproc", "2"]
    done = run(copy, "scripts/quickstart.sh", *arguments, REQUIREMENTS=CPU)
    assert done.stdout.splitlines() == [
        "python -m rl.simple_launch configs/quickstart.jsonnet num_iterations=3 --nproc 2",
        "python -m rl.tools.commands.report configs/quickstart.jsonnet num_iterations=3",
    ]
    plain = run(copy, "scripts/quickstart.sh", REQUIREMENTS=CPU).stdout
    assert plain.endswith("python -m rl.tools.commands.report configs/quickstart.jsonnet\n")


HF = """[[ $1 == download && -z ${HUB_DOWN:-} ]] || exit 1
echo "hf $*" >>"$HUB/calls"
repository=$2; shift 2; files=()
while [[ $1 != --repo-type ]]; do files+=("$1"); shift; done
mkdir -p "$4" && folder=$(realpath "$4") && cd "$HUB/$repository" || exit 1
if ((${#files[@]})); then cp "${files[@]}" "$folder"; else cp -r . "$folder"; fi"""
"""download REPOSITORY [FILES] --repo-type dataset --local-dir FOLDER, from $HUB."""
OMNIEDIT, RL_100K = "mair-lab/omniedit-got-tokenized-256", "rabiulawal/emu3_tokenized_rl_100k"
LIST = "list/tokenized_datalist.json"


@pytest.fixture
def hub(copy):
    """The published repositories, with archives with and without a top folder."""
    make_venv(copy)
    fake(copy / ".venv/bin/hf", HF)
    hub, dataset = copy / "hub", copy / "set"
    for path in (dataset / LIST, dataset / "feature/0.pth"):
        path.parent.mkdir(parents=True)
        path.write_text("{}")
    for archive, name in (
        (f"{OMNIEDIT}/validation_22march_256.tar.gz", "validation_22march_256"),
        (f"{OMNIEDIT}/train_22march_256.tar.gz", "train_22march_256"),
        (f"{RL_100K}/emu3_tokenized_rl_100k.tar.gz", "emu3_tokenized_rl_100k/aurora_ag/train"),
        ("mair-lab/earl-datasets/magicbrush.tar.gz", "train"),
    ):
        (hub / archive).parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(hub / archive, "w:gz") as file:
            file.add(dataset, arcname=name)
    shutil.copytree(dataset, hub / "mair-lab/earl-datasets/vismin/train")
    return hub


def setup_datasets(copy, hub, *sets, **more):
    return run(copy, "scripts/setup_datasets.sh", *sets, HUB=str(hub), REQUIREMENTS=CPU, **more)


@pytest.mark.slow
def test_published_sets_are_fetched_and_unpacked_once(copy, hub):
    """They are unpacked where EARL's base config reads them."""
    done = setup_datasets(copy, hub, APP__DATA_DIR=str(copy / "data"))
    assert done.returncode == 0, done.stderr + done.stdout
    expected = {
        str(copy / "data" / folder / LIST)
        for folder in (
            "validation_22march_256",
            "train_22march_256",
            "emu3_tokenized_rl_100k/aurora_ag/train",
            "earl-datasets/magicbrush/train",
            "earl-datasets/vismin/train",
        )
    }
    assert {line for line in done.stdout.splitlines() if line.endswith(LIST)} == expected
    again = setup_datasets(copy, hub, APP__DATA_DIR=str(copy / "data"))
    assert again.returncode == 0 and "unpacking" not in again.stdout
    alone = setup_datasets(copy, hub, "validation", APP__DATA_DIR="")
    assert f"RL_DATASETS/data/validation_22march_256/{LIST}" in alone.stdout
    assert (
        (hub / "calls")
        .read_text()
        .endswith(
            f"hf download {OMNIEDIT} validation_22march_256.tar.gz --repo-type dataset "
            "--local-dir RL_DATASETS/data\n"
        )
    )


@pytest.mark.slow
def test_a_set_that_cannot_be_fetched_is_named_and_archives_cannot_escape(copy, hub):
    unknown = setup_datasets(copy, hub, "validaton")
    assert unknown.returncode == 2 and holds(unknown.stderr, "validaton ... validation")
    down = setup_datasets(copy, hub, "earl", HUB_DOWN="1")
    assert down.returncode == 1 and holds(down.stderr, "mair-lab/earl-datasets ... start it again")
    with tarfile.open(hub / RL_100K / "emu3_tokenized_rl_100k.tar.gz", "w:gz") as file:
        file.addfile(tarfile.TarInfo("set/../../escaped"), io.BytesIO(b""))
    done = setup_datasets(copy, hub, "rl_100k", APP__DATA_DIR=str(copy / "data"))
    assert done.returncode == 1
    assert holds(done.stderr, "emu3_tokenized_rl_100k.tar.gz cannot be unpacked")
    assert not list(copy.rglob("escaped"))
