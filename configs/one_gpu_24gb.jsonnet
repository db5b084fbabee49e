// A first real run on one GPU of 24 GB: vlm_reasoning.jsonnet with Qwen3-VL-2B. No judge, no renderer,
// and no licence to accept on the hub. docs/gpu.md has the download and how to estimate the hours.
//
//   export APP__BASE_EXP_DIR=runs APP__RUN_NAME=my-run
//   rl train configs/one_gpu_24gb.jsonnet [seed=1 ...]
(import 'vlm_reasoning.jsonnet') + {
  world_size: 1,
  gpu_gb: 24,
  policy+: {
    type: 'qwen3_vl',
    model_path: 'Qwen/Qwen3-VL-2B-Instruct',
    image_max_pixels: 1024 * 32 * 32,  // here 32 x 32 pixels are one token
  },
  optimizer+: {
    backend: 'torch',
    zero_stage:: null,  // one rank shards nothing
    gradient_checkpointing: true,
  },
  tracking+: { wandb_project: 'one_gpu_24gb' },
}
