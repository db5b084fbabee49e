#!/usr/bin/env bash
# Install, lint, check types, test on all cores. `--all` adds the slow tests; other arguments go to
# pytest, -n 0 (no worker processes) among them:
#   ./scripts/test.sh -k sampler
#   ./scripts/test.sh -k sampler -n 0 --pdb
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/_install.sh requirements-test.lock
source .venv/bin/activate

selection=(-m "not slow")
if [[ ${1:-} == --all ]]; then
    selection=()
    shift
fi
ruff check .
ruff format --check .
mypy
# Worksteal: a worker takes half of all files in order, so that few fixtures of a file are made
# twice, and who is done first takes tests off the other's end.
python -m pytest -n auto --dist worksteal "${selection[@]}" "$@"
