#!/usr/bin/env bash
# Install, lint, check types, test. `--all` adds the slow tests; other arguments go to pytest:
#   ./scripts/test.sh -k sampler
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
python -m pytest "${selection[@]}" "$@"
