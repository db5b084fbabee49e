#!/usr/bin/env bash
# EARL's name for scripts/setup_datasets.sh.
set -euo pipefail
exec "$(dirname "${BASH_SOURCE[0]}")/../../scripts/setup_datasets.sh" "$@"
