#!/usr/bin/env bash
# From scratch to a trained policy: installs, trains in the tiny world, shows the results.
#   ./scripts/quickstart.sh                      the main system, configs/quickstart.jsonnet
#   ./scripts/quickstart.sh tiny_earl            another: configs/tiny_earl.jsonnet
#   ./scripts/quickstart.sh num_iterations=10    further arguments go to the run
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/_install.sh
source .venv/bin/activate

config=configs/quickstart.jsonnet
if [[ $# -gt 0 && -f configs/$1.jsonnet ]]; then
    config=configs/$1.jsonnet
    shift
fi
overrides=()
for argument; do
    if [[ $argument == *=* && $argument != -* ]]; then overrides+=("$argument"); fi
done
python -m rl.simple_launch "$config" "$@"
python -m rl.tools.commands.report "$config" "${overrides[@]}"
echo "to use the command rl in this shell: source .venv/bin/activate"
