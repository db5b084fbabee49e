#!/usr/bin/env bash
# Install, lint, check types, look for unsafe calls and for keys, test on all cores. `--all` adds the
# slow tests; other arguments go to pytest, -n 0 (no worker processes) among them:
#   ./scripts/test.sh -k sampler
#   ./scripts/test.sh -k sampler -n 0 --pdb
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/_install.sh requirements-test.lock
source .venv/bin/activate
# The tests start hundreds of processes: what they import is compiled once, not by each of them.
unset PYTHONDONTWRITEBYTECODE

selection=(-m "not slow")
if [[ ${1:-} == --all ]]; then
    selection=(--durations 40)
    shift
fi
ruff check .
ruff format --check .
mypy
# An exception stands beside its line, with its reason: `# nosec B615 # a local folder`.
bandit -q -ll -r rl tiny_world benchmarks scripts
# Made-up keys of the tests hold one of these words; upper case names a variable. Model ids look
# like Base64.
if git rev-parse --is-inside-work-tree &>/dev/null; then
    git ls-files -z -- . ':!*.lock' ':!*.png' ':!tiny_world/weights' ':!benchmarks/results' \
        ':!tests/documents' ':!tests/config/format_1' ':!tests/algorithm/*.json' |
        xargs -0 detect-secrets-hook --no-verify --disable-plugin Base64HighEntropyString \
            --exclude-secrets 'hunter2|0123456789|zyxwvu|^[A-Z][A-Z0-9_]*$'
fi
# Worksteal: a worker takes half of all files in order, so that few fixtures of a file are made
# twice, and who is done first takes tests off the other's end.
python -m pytest -n auto --dist worksteal "${selection[@]}" "$@"
