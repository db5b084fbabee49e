// Pictures on one GPU of 48 GB, without a judge: prompt_enhancement.jsonnet with Qwen3-VL-4B. Policy,
// Stable Diffusion 3 and CLIP share the GPU, and the engine sleeps while others work. The SD3 weights
// are gated: accept their licence on the hub first. docs/gpu.md has the downloads and how to estimate
// the hours.
//
//   export APP__BASE_EXP_DIR=runs APP__RUN_NAME=my-run HF_TOKEN=...
//   rl train configs/one_gpu_48gb.jsonnet [seed=1 ...]
(import 'prompt_enhancement.jsonnet') + {
  one_gpu:: true,
  gpu_gb: 48,
  policy+: { type: 'qwen3_vl', model_path: 'Qwen/Qwen3-VL-4B-Instruct' },
  tracking+: { wandb_project: 'one_gpu_48gb' },
}
