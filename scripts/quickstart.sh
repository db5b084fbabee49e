#!/usr/bin/env bash
# From nothing to a trained policy: install, train the tiny world, show what was learnt.
# Arguments go to the run: ./scripts/quickstart.sh num_iterations=10
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/_install.sh
source .venv/bin/activate

overrides=()
for argument; do
    if [[ $argument == *=* && $argument != -* ]]; then overrides+=("$argument"); fi
done
python -m rl.simple_launch configs/quickstart.jsonnet "$@"
python scripts/report.py configs/quickstart.jsonnet "${overrides[@]}"
