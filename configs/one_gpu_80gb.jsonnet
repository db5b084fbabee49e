// Image editing on one GPU of 80 GB: qwen_image_21_fewstep.jsonnet with the batch of
// qwen_image_21.jsonnet. The judge runs elsewhere (docs/judge.md). Qwen-Image-2.1 is not for
// commercial use (docs/models.md). docs/gpu.md has the downloads and how to estimate the hours.
//
//   export APP__BASE_EXP_DIR=runs APP__RUN_NAME=my-run
//   export APP__REWARD_FUNCTION_API_BASE=http://judge-host:4877
//   rl train configs/one_gpu_80gb.jsonnet [model_path=... seed=1 ...]
(import 'qwen_image_21_fewstep.jsonnet') + {
  world_size: 1,
  prompts_per_iteration: 16,
  optimizer+: {
    backend: 'torch',
    zero_stage:: null,  // one rank shards nothing
    gradient_checkpointing: true,  // the graphs of 16 groups fit only so
  },
  tracking+: { wandb_project: 'one_gpu_80gb' },
}
