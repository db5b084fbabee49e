#!/usr/bin/env bash
# Installs, lints, checks types, searches for unsafe calls, and tests on all cores.
#   ./scripts/test.sh                     the fast tests
#   ./scripts/test.sh --all               the slow ones and a search for keys, too
#   ./scripts/test.sh --slow              only what --all adds
#   ./scripts/test.sh --other-cpus        only tests of arithmetic, with the kernels of older CPUs
#   ./scripts/test.sh --with-chromium ... a browser for tests of the run's page (Debian's, by apt)
#   ./scripts/test.sh -k sampler -n 0     further arguments go to pytest; -n 0: no worker processes
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tier=fast selection=(-m "not slow")
while [[ ${1:-} =~ ^--(all|slow|other-cpus|with-chromium)$ ]]; do
    case $1 in
        --all) tier=all selection=() ;;
        --slow) tier=slow selection=(-m slow) ;;
        --other-cpus) tier=other-cpus ;;
        --with-chromium) with_chromium=true ;;
    esac
    shift
done
if [[ -n ${with_chromium:-} ]] && ! command -v chromium >/dev/null; then
    if ! command -v apt-get >/dev/null; then
        echo "--with-chromium installs Debian's chromium by apt-get, which is not here: install a" \
            "chromium that is found as 'chromium', and start again." >&2
        exit 1
    fi
    root=()
    [[ $(id -u) == 0 ]] || root=(sudo)
    "${root[@]}" apt-get update
    # The second package has fonts for Chinese, Japanese and Korean.
    "${root[@]}" apt-get install -y --no-install-recommends chromium fonts-noto-cjk
fi
scripts/_install.sh requirements-test.lock
source .venv/bin/activate
# The tests start hundreds of processes, which share compiled files.
unset PYTHONDONTWRITEBYTECODE

if [[ $tier == fast || $tier == all ]]; then
    ruff check .
    ruff format --check .
    found=$(mktemp)
    mypy >"$found" & # half a minute of one core
    types=$!
    # Exceptions are in the code, with their reasons: `# nosec B615 # a local folder`.
    bandit -q -ll -r rl tiny_world benchmarks examples
fi
if [[ $tier == slow || $tier == all ]] && git rev-parse --is-inside-work-tree &>/dev/null; then
    # The tests' fake keys contain one of these strings; upper case is the name of a variable. Model
    # ids look like Base64.
    git ls-files -z -- . ':!*.lock' ':!*.png' ':!tiny_world/weights' ':!benchmarks/results' \
        ':!tests/documents' ':!tests/**/*.json' |
        xargs -0 -n 100 -P "$(nproc)" detect-secrets-hook --no-verify \
            --disable-plugin Base64HighEntropyString \
            --exclude-secrets 'hunter2|0123456789|zyxwvu|^[A-Z][A-Z0-9_]*$'
fi
# Fast tests spend a third of their time waiting for processes and time-outs.
workers=auto
[[ $tier == fast ]] && workers=$(($(nproc) + 1))
# Worksteal: each worker gets a contiguous share of the files, so that few fixtures are made twice,
# and an idle worker takes tests from the end of another's share.
pytest=(python -m pytest -n "$workers" --dist worksteal --durations 20)
arithmetic=(
    tests/algorithm tests/learner/test_learner_update.py tests/engines/test_engines_transformers.py
    tests/policies/test_policies_{packed,emu3,qwen3_vl}.py
    tests/train/test_golden_run.py::test_five_iterations_match_the_golden_run
    tests/renderers/test_renderers_{qwen_image,qwen_image_21,sd3,stock}.py
)
if [[ $tier == other-cpus ]]; then
    for kernels in default:SSE41 avx2:AVX2; do # PyTorch's own, and oneDNN's
        ATEN_CPU_CAPABILITY=${kernels%:*} ONEDNN_MAX_CPU_ISA=${kernels#*:} "${pytest[@]}" \
            "${arithmetic[@]}" "$@"
    done
else
    status=0
    "${pytest[@]}" "${selection[@]}" "$@" || status=$?
    if [[ -n ${types:-} ]]; then
        wait "$types" || status=1
        cat "$found"
        rm "$found"
    fi
    exit "$status"
fi
