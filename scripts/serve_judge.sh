#!/usr/bin/env bash
# Serve the judge with vLLM: an OpenAI-compatible endpoint for judge.api_base.
#
#   ./scripts/serve_judge.sh [more vllm serve options]
#
# Environment (defaults in the code below):
#   JUDGE_MODEL      the served model; judge.model must be the same. The default, about 36 GB of
#                    weights, fits one GPU of 80 GB
#   JUDGE_HOST       address to listen on; 0.0.0.0 for other machines (then set VLLM_API_KEY)
#   JUDGE_PORT       port
#   JUDGE_MAX_LEN    context, tokens. A picture costs at most (side/28)^2: 752 at 768 px, so two of
#                    them, the longest prompt (700) and a reply of 512 need 2,800; 8192 leaves room
#                    for image_side_px up to about 1,500
#   JUDGE_IMAGES     pictures per question: the result and the sample's sources (2 for one source).
#                    Each needs its share of JUDGE_MAX_LEN
#   JUDGE_URL_FILE   a file to write the URL to; judge.api_base may name that file
#   VLLM_API_KEY     key that clients must send; judge.api_key_env names the variable that has it
set -euo pipefail

model=${JUDGE_MODEL:-Qwen/Qwen3-VL-32B-Instruct-FP8}
host=${JUDGE_HOST:-127.0.0.1}
port=${JUDGE_PORT:-4877}
max_len=${JUDGE_MAX_LEN:-8192}
num_images=${JUDGE_IMAGES:-2}

if [[ -n ${CUDA_VISIBLE_DEVICES:-} ]]; then
    num_gpus=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c .)
elif command -v nvidia-smi >/dev/null; then
    num_gpus=$(nvidia-smi -L | wc -l)
else
    num_gpus=0
fi
if ((num_gpus == 0)); then
    echo "serve_judge.sh: no GPU to be seen. The quickstart needs none of this:" \
        "its config starts a judge of its own (judge.start_command)." >&2
    exit 1
fi
# A power of two, which divides the numbers of attention heads (64 and 8 in the 32B).
tensor_parallel=1
while ((tensor_parallel * 2 <= num_gpus && tensor_parallel < 8)); do
    tensor_parallel=$((tensor_parallel * 2))
done

if [[ $host != 127.* && $host != localhost && -z ${VLLM_API_KEY:-} ]]; then
    echo "serve_judge.sh: listening on $host without VLLM_API_KEY: anyone who reaches this port" \
        "can use it." >&2
fi
# Another run's judge on this port would answer this run's questions. One that is ending gets 10 s.
tries=0
while (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do
    if ((++tries > 20)); then
        echo "serve_judge.sh: another process answers on port $port: set JUDGE_PORT to a free one" >&2
        exit 1
    fi
    sleep 0.5
done
if [[ -n ${JUDGE_URL_FILE:-} ]]; then
    public_host=$host
    [[ $host == 0.0.0.0 ]] && public_host=$(hostname)
    echo "http://$public_host:$port/v1" >"$JUDGE_URL_FILE"
fi

# --generation-config vllm: with the model's defaults (top_k 1, repetition_penalty 1.05) a retry
# with another seed and temperature would give the same reply.
exec vllm serve "$model" \
    --host "$host" --port "$port" \
    --tensor-parallel-size "$tensor_parallel" \
    --max-model-len "$max_len" \
    --limit-mm-per-prompt "{\"image\": $num_images, \"video\": 0}" \
    --enable-prefix-caching \
    --generation-config vllm \
    "$@"
