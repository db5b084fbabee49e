"""The shell scripts parse, choose the right Python, install once and select the right tests."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import pytest
from tiny_config import REPO
from tiny_messages import holds
from tiny_waits import wait_for

CPU, GPU, TEST = LOCKS = ("requirements-cpu.lock", "requirements.lock", "requirements-test.lock")
SLOW = pytest.mark.slow
SCRIPTS = [*sorted((REPO / "scripts").glob("*.sh")), REPO / ".ci" / "run"]


@pytest.fixture
def copy(tmp_path):
    """A copy of the scripts in a folder where every command that they call can be replaced."""
    for name in ("scripts", ".ci"):
        shutil.copytree(REPO / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", *LOCKS):
        shutil.copy(REPO / name, tmp_path / name)
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


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_parse_and_are_strict_and_executable(script):
    subprocess.run(["bash", "-n", script], check=True)
    text = script.read_text()
    assert text.startswith("#!/usr/bin/env bash\n") and "set -euo pipefail\n" in text
    assert os.access(script, os.X_OK)


class Start(NamedTuple):
    """A start of a script in the copy, and what must come of it."""

    command: str
    says: str = ""
    """Parts of what it prints, as for `holds`."""
    code: int = 0
    lines: Sequence[str] | None = None
    """All that it prints; patterns of `fnmatch`."""
    calls: Sequence[str] = ()
    """All that installers were called with, after uv's own installation."""
    made: Mapping[str, str] = {}
    """Programs of the copy and their bodies, written before."""
    absent: str = ""
    """A file that must not exist afterwards."""


def check(copy: Path, start: Start) -> None:
    for name, body in start.made.items():
        fake(copy / name, body)
    done = run(copy, "-o", "pipefail", "-c", start.command)
    printed = done.stdout + done.stderr
    assert done.returncode == start.code, printed
    assert holds(printed, start.says), printed
    if start.lines is not None:
        assert len(printed.splitlines()) == len(start.lines), printed
        assert all(map(fnmatch, printed.splitlines(), start.lines)), printed
    noted = (copy / "calls").read_text().splitlines() if (copy / "calls").exists() else []
    assert noted[1:] == list(start.calls)
    (copy / "calls").unlink(missing_ok=True)
    assert not start.absent or not list(copy.glob(start.absent))


TOOLS = {f".venv/bin/{tool}": f'echo "{tool} $*"'
         for tool in ("python", "ruff", "mypy", "bandit", "detect-secrets-hook")}  # fmt: skip
TOOLS[".venv/bin/activate"] = 'export PATH="$PWD/.venv/bin:$PATH"'
COMPLETE = """for lock in *.lock; do
    echo "$lock $(cat $lock pyproject.toml | cksum)" >>.venv/installed
done
export REQUIREMENTS=requirements-cpu.lock
"""
"""With `TOOLS`: `_install.sh` takes .venv for complete; its tools only print their arguments."""
INSTALL = "scripts/_install.sh"
OLD = "[[ $1 == -V ]] && echo Python 3.9.2; exit 1"
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
[TORCH] = [pin for pin in PROJECT["optional-dependencies"]["train"] if pin.startswith("torch==")]
[VISION] = [pin for pin in PROJECT["optional-dependencies"]["cpu"] if "torchvision" in pin]
CPU_BUILD = f"mkdir -p .venv/lib/python3.11/site-packages/{TORCH.replace('==', '-')}+cpu.dist-info"


def reports(number: str) -> dict[str, str]:
    """A Python that reports another version to the unchanged check, and makes no .venv."""
    check = f"import sys; sys.version_info = ({number}); exec(sys.argv[1])"
    python = f'[[ $1 != -c ]] || exec {sys.executable} -c "{check}" "$2"; echo "made $*"; exit 3'
    return {"bin/other": python}


def platform(system: str, machine: str, libc: str) -> dict[str, str]:
    return {
        "bin/uname": f"[[ $1 == -s ]] && echo {system} || echo {machine}",
        "bin/getconf": f"echo {libc}; [[ -n '{libc}' ]]",
    }


def machine(uv: str = "", torch: str = CPU_BUILD, gpu: bool = False) -> dict[str, str]:
    """A machine without .venv, whose installers note their arguments in `calls`; `uv`: its body if
    `pip install uv` succeeds; `torch`: what `pip install torch` does."""
    is_python = f'[[ $1 != -c ]] || exec {sys.executable} "$@"\n'
    return {
        "bin/nvidia-smi": "exit 0" if gpu else "exit 9",
        "bin/python3": f"{is_python}mkdir -p .venv/bin && cp bin/venv-python .venv/bin/python",
        "bin/venv-python": f"""{is_python}arguments="$*"
[[ $* == *uninstall* ]] ||
    echo "pip${{arguments#-m pip install --no-input --disable-pip-version-check}}" >>calls
[[ $* != *uv==* ]] || {"cp bin/uv .venv/bin/uv" if uv else "exit 1"}
[[ $* != *torch==* ]] || {torch}
exit 0""",
        "bin/uv": f"""all="$*"
echo "uv${{all#pip install --python .venv/bin/python}}" >>calls
{uv}""",
    }


INDEX = "--index-url https://download.pytorch.org/whl/cpu"
REFUSES_INDEX = "[[ $* != *--index-url* ]] || exit 1"
BUILDS = f"{TORCH}+cpu {VISION}+cpu"
FROM_INDEX = f"pip --no-deps --timeout 15 --retries 1 {INDEX} {BUILDS}"
LOCKED, LOCAL = f"--no-deps --require-hashes -r {CPU}", "--no-deps -e ."
ANYWHERE = f"pip --no-deps --no-compile {TORCH}"
INSTALLED = f"{CPU} ... .venv/install.log ... installed"
AGAIN = Start(INSTALL, lines=[])
PYTEST = "python -m pytest -n auto --dist worksteal --durations 20"
FAST = PYTEST.replace("auto", "[0-9]*")
LINT = ["bandit -q -ll -r rl tiny_world benchmarks examples", "mypy "]
CHECKED = ["ruff check .", "ruff format --check ."]
TEST_SH = f"{COMPLETE}scripts/test.sh"
HERE = "Linux on x86-64; here is"


HF = """[[ $1 == download && -z ${HUB_DOWN:-} ]] || exit 1
echo "hf $*" >>hub/downloads
repository=$2; shift 2; files=()
while [[ $1 != --repo-type ]]; do files+=("$1"); shift; done
mkdir -p "$4" && folder=$(realpath "$4") && cd "hub/$repository" || exit 1
if ((${#files[@]})); then cp "${files[@]}" "$folder"; else cp -r . "$folder"; fi"""
"""download REPOSITORY [FILES] --repo-type dataset --local-dir FOLDER, from hub/."""
OMNIEDIT, RL_100K = "mair-lab/omniedit-got-tokenized-256", "rabiulawal/emu3_tokenized_rl_100k"
LIST = "list/tokenized_datalist.json"
HUB = f"""mkdir -p set/list set/feature hub/{{{OMNIEDIT},{RL_100K}}}
mkdir -p hub/mair-lab/earl-datasets/vismin
echo {{}} >set/{LIST}; echo {{}} >set/feature/0.pth
pack() {{ tar -czf "hub/$1" --transform "s,^set,$2," set; }}
pack {OMNIEDIT}/validation_22march_256.tar.gz validation_22march_256
pack {OMNIEDIT}/train_22march_256.tar.gz train_22march_256
pack {RL_100K}/emu3_tokenized_rl_100k.tar.gz emu3_tokenized_rl_100k/aurora_ag/train
pack mair-lab/earl-datasets/magicbrush.tar.gz train
cp -r set hub/mair-lab/earl-datasets/vismin/train
"""
"""Makes the published repositories, with archives with and without a top folder."""
GET = f"{COMPLETE}scripts/setup_datasets.sh"


LISTED = [
    f"*/data/{folder}/{LIST}"
    for folder in (
        "earl-datasets/magicbrush/train",
        "earl-datasets/vismin/train",
        "emu3_tokenized_rl_100k/aurora_ag/train",
        "train_22march_256",
        "validation_22march_256",
    )
]


@pytest.mark.parametrize(
    "starts",
    [
        pytest.param([
            Start(f"PYTHON=old {INSTALL}", "3.11.4 to 3.13 ... venv ... ensurepip ... Python 3.9.2 "
                  "... apt install python3 python3-venv ... PYTHON=", 1, made={"bin/old": OLD},
                  absent=".venv"),
            Start(INSTALL, "Python 3.9.2 ... 3.11.4 to 3.13 ... delete .venv", 1,
                  made={".venv/bin/python": OLD}),
        ], id="an old Python or .venv"),
        *(pytest.param([
            Start(f"PYTHON=other REQUIREMENTS={CPU} {INSTALL}", says, 1, lines=lines,
                  made=reports(number)),
        ], id=f"Python {number}", marks=SLOW) for number, says, lines in (
            ("3, 11, 3", "No Python 3.11.4", ["*"]),
            ("3, 11, 4", "made -m venv .venv ... failed", None),
            ("3, 14, 0", "No Python 3.11.4", ["*"]),
        )),
        *(pytest.param([
            Start(f"PYTHON=no-such-python {INSTALL}", "", 1, [line], made=platform(*names),
                  absent=".venv"),
        ], id=" ".join(names)) for line, *names in (
            (f"*{HERE} Darwin on arm64*", "Darwin", "arm64", ""),
            (f"*{HERE} Linux on aarch64*", "Linux", "aarch64", "glibc 2.36"),
            (f"*{HERE} MINGW64_NT-10.0 on x86_64*", "MINGW64_NT-10.0", "x86_64", ""),
            ("*glibc 2.31 or newer*", "Linux", "x86_64", "glibc 2.28"),
            ("*here is: none*", "Linux", "x86_64", ""),
            ("No Python 3.11.4*", "Linux", "x86_64", "glibc 2.31"),
            ("No Python 3.11.4*", "Linux", "x86_64", "glibc 2.100"),
        )),
        *(pytest.param([
            Start(INSTALL, f"{INSTALLED}{says}", calls=calls, made=machine(uv, torch)), AGAIN,
        ], id=name, marks=SLOW) for name, uv, torch, says, calls in (
            ("uv", f"[[ $* != *torch==* ]] || {CPU_BUILD}", CPU_BUILD, "",
             [f"uv --no-deps {INDEX} {BUILDS}", f"uv {LOCKED}", f"uv {LOCAL}"]),
            ("uv fails", "exit 1", CPU_BUILD, "",
             [f"uv --no-deps {INDEX} {BUILDS}", FROM_INDEX, f"uv {LOCKED}", f"pip {LOCKED}",
              f"uv {LOCAL}", f"pip {LOCAL}"]),
            ("torch from another place", "",
             f"{{ [[ $* != *--index-url* ]] && {CPU_BUILD}; }} || exit 1", "",
             [FROM_INDEX, ANYWHERE, f"pip {LOCKED}", f"pip {LOCAL}"]),
            ("no uv", "", CPU_BUILD, "", [FROM_INDEX, f"pip {LOCKED}", f"pip {LOCAL}"]),
            ("only torch for CUDA", "", REFUSES_INDEX, " ... PyTorch's CUDA build",
             [FROM_INDEX, ANYWHERE, f"pip {TORCH}", f"pip {LOCKED}", f"pip {LOCAL}"]),
        )),
        pytest.param([
            Start(f"{before}{INSTALL}", GPU, made=machine(gpu=True),
                  calls=[f"pip --no-deps --require-hashes -r {GPU}", f"pip {LOCAL}"])
            for before in ("", f"echo '# pin' >>{GPU}; ", "echo '# pin' >>pyproject.toml; ")
        ], id="a GPU", marks=SLOW),
        *(pytest.param([
            Start(f"echo '{present} 1 2\n{TEST} 3 4' >.venv/installed; "
                  f"REQUIREMENTS={other} {INSTALL}",
                  f"{present} ... {other} ... delete .venv ... REQUIREMENTS={present}", 1,
                  made=TOOLS),
        ], id=f"{other} beside {present}") for present, other in ((CPU, GPU), (GPU, CPU))),
        pytest.param([
            *[Start(f"REQUIREMENTS={GPU} {INSTALL}",
                    "no matching distribution ... .venv/install.log", 1,
                    made=machine() | {"bin/venv-python": "[[ $1 == -c ]] || "
                                      "{ echo no matching distribution; exit 1; }"})] * 2,
            Start(f"REQUIREMENTS=requirements-tpu.lock {INSTALL}", "no requirements-tpu.lock", 1),
        ], id="an installation that fails", marks=SLOW),
        pytest.param([
            Start(f"{TEST_SH} -k 'a or b' | LC_ALL=C sort", made=TOOLS,
                  lines=[*LINT, f"{FAST} -m not slow -k a or b", *CHECKED]),
            Start(f"{TEST_SH} --all -x | LC_ALL=C sort", lines=[*LINT, f"{PYTEST} -x", *CHECKED]),
            Start(f"{TEST_SH} --slow -x", lines=[f"{PYTEST} -m slow -x"]),
            Start(f"{TEST_SH} --other-cpus", lines=[f"{PYTEST} tests/*"] * 2),
            Start(f"{COMPLETE}.ci/run | grep -v '^ruff\\|^mypy\\|^bandit'",
                  made={"bin/chromium": ""}, lines=[
                      *["*rl*"] * 3, f"{FAST} -m not slow", f"{PYTEST} -m slow",
                      *[f"{PYTEST} tests/*"] * 2, "*all of it"]),
            Start(TEST_SH, code=1, made={".venv/bin/mypy": "exit 1"}),
            Start(TEST_SH, code=1, made={".venv/bin/mypy": "", ".venv/bin/ruff": "exit 1"}),
            Start(TEST_SH, code=5, made={".venv/bin/ruff": "", ".venv/bin/python": "exit 5"}),
        ], id="the tiers of tests"),
        pytest.param([
            Start(f"{COMPLETE}scripts/quickstart.sh num_iterations=3 --nproc 2", made=TOOLS, lines=[
                "python -m rl.simple_launch configs/quickstart.jsonnet num_iterations=3 --nproc 2",
                "python -m rl.tools.commands.report configs/quickstart.jsonnet num_iterations=3",
                "*source .venv/bin/activate",
            ]),
            Start(f"{COMPLETE}scripts/quickstart.sh", lines=[
                "python -m rl.simple_launch configs/quickstart.jsonnet",
                "python -m rl.tools.commands.report configs/quickstart.jsonnet",
                "*source .venv/bin/activate",
            ]),
        ], id="the quickstart"),
        # Unpacked where EARL's base config reads them.
        pytest.param([
            Start(f"{HUB}export APP__DATA_DIR=$PWD/data\n{GET} | grep '{LIST}$' | LC_ALL=C sort",
                  lines=LISTED, made=TOOLS | {".venv/bin/hf": HF}),
            Start(f"export APP__DATA_DIR=$PWD/data\n{GET} | LC_ALL=C sort", lines=LISTED),
            Start(f"export APP__DATA_DIR=\n{GET} validation",
                  f"RL_DATASETS/data/validation_22march_256/{LIST}"),
            Start("tail -n 1 hub/downloads", lines=[
                f"hf download {OMNIEDIT} validation_22march_256.tar.gz --repo-type dataset "
                "--local-dir RL_DATASETS/data"]),
        ], id="data sets", marks=SLOW),
        pytest.param([
            Start(f"{HUB}{GET} validaton", "validaton ... validation", 2,
                  made=TOOLS | {".venv/bin/hf": HF}),
            Start(f"export HUB_DOWN=1\n{GET} earl", "mair-lab/earl-datasets ... start it again", 1),
            Start(f"tar -czf hub/{RL_100K}/emu3_tokenized_rl_100k.tar.gz -P "
                  f"--transform 's,.*,set/../../escaped,' pyproject.toml\n"
                  f"export APP__DATA_DIR=$PWD/data\n{GET} rl_100k",
                  "emu3_tokenized_rl_100k.tar.gz cannot be unpacked", 1, absent="**/escaped"),
        ], id="data sets that cannot be had", marks=SLOW),
    ],
)  # fmt: skip
def test_a_script_does_what_it_says(copy: Path, starts: list[Start]) -> None:
    for start in starts:
        check(copy, start)


DOCKERFILE = (REPO / "Dockerfile").read_text()
BUILDER = f"""set -e
ENV() {{ export "$@"; }}
RUN() {{ "$@"; }}
COPY() {{
    mkdir -p "${{!#}}"
    for file in "${{@:2:$#-2}}"; do
        grep -qxF "!${{file%%/*}}" {REPO}/.dockerignore
        cp "{REPO}/$file" "${{!#}}"
    done
}}
"""
"""With these, bash runs lines of a Dockerfile. COPY wants what .dockerignore lets pass."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lock", "calls"),
    [
        (CPU, [FROM_INDEX, f"pip {LOCKED}", f"pip {LOCAL}"]),
        (GPU, [f"pip --no-deps --require-hashes -r {GPU}", f"pip {LOCAL}"]),
    ],
)
def test_the_image_installs_its_lock_from_what_it_copied(
    tmp_path: Path, lock: str, calls: list[str]
) -> None:
    """The steps between root's and `COPY . .`, in an empty folder."""
    steps = DOCKERFILE.partition("\nWORKDIR /vlm-edit-rl")[2].partition("COPY --chown=rl . .")[0]
    steps = f"{BUILDER}LOCK={lock}{steps.replace('/vlm-edit-rl', str(tmp_path))}"
    check(tmp_path, Start(steps, calls=calls, made=machine()))
    # Without a file there, `pip install -e .` links neither package.
    assert all((tmp_path / package / "__init__.py").is_file() for package in ("rl", "tiny_world"))
    assert re.search(rf"LOCK={lock}\s", DOCKERFILE)


def test_the_image_has_a_supported_python_and_gets_no_run_or_key() -> None:
    low, high = map(int, re.findall(r"3\.(\d+)", PROJECT["requires-python"]))
    assert {low < int(n) < high for n in re.findall(r"python3\.(\d+)-", DOCKERFILE)} == {True}
    everything, *rules = re.findall(r"^[^#\n].*", (REPO / ".dockerignore").read_text(), re.M)
    kept = {rule[1:] for rule in rules if rule[0] == "!"}
    assert everything == "*" and all((REPO / name).exists() for name in kept)
    assert kept & {"configs", "rl", ".git", ".venv", "runs", "wandb"} == {"configs", "rl"}


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
def test_no_process_outlives_a_stopped_installation(copy: Path, installer: str) -> None:
    for name, body in machine(torch=installer).items():
        fake(copy / name, body)
    process = subprocess.Popen(
        ["bash", INSTALL],
        cwd=copy,
        env={**os.environ, "PATH": f"{copy / 'bin'}:/usr/bin:/bin"},
        stdout=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # nohup ignores it
    )
    wait_for((copy / "started").exists)
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=120)  # returns when no process has the pipe open
    assert process.returncode != 0


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
def test_campaign_tests_run_only_when_their_mark_is_selected(
    tmp_path: Path, pytestconfig: pytest.Config, options: list[str], selected: list[str]
) -> None:
    conftest = pytestconfig.pluginmanager.get_plugin(str(REPO / "tests/conftest.py"))
    (tmp_path / "test_tiers.py").write_text(
        "import pytest\n"
        "def test_quick(): pass\n"
        "@pytest.mark.slow\ndef test_slow(): pass\n"
        "@pytest.mark.campaign\ndef test_campaign(): pass\n"
    )
    collected: list[str] = []

    class Notes:
        def pytest_collection_finish(self, session: pytest.Session) -> None:
            collected.extend(item.name.removeprefix("test_") for item in session.items)

    quiet = ["--collect-only", "--capture=no", "--import-mode=importlib", "-p", "no:cacheprovider"]
    ours = ["-c", str(REPO / "pyproject.toml"), "--rootdir", str(tmp_path), "--noconftest"]
    pytest.main([*quiet, *ours, *options, str(tmp_path)], plugins=[conftest, Notes()])
    assert sorted(collected) == selected, "in any order"
