// Image editing on one GPU of 24 GB: Qwen3-VL-2B looks at the picture and rewrites the request, and
// FLUX.2-klein-4B, a stock pipeline of diffusers, draws from these words in 4 steps. The engine sleeps
// while others work, and the pipeline's weights are in host memory (27 GB in all) except while it draws,
// one part of it at a time. The judge runs elsewhere. docs/gpu.md has memory, downloads and an estimate
// of the hours.
//
// Every model is under Apache-2.0: `license=commercial` passes. The data, Complex-Edit, is not for
// commercial use; give your own. Not tried with the released weights.
//
//   export APP__BASE_EXP_DIR=runs APP__RUN_NAME=my-run
//   export APP__REWARD_FUNCTION_API_BASE=http://judge-host:4877
//   python -m rl.simple_launch configs/one_card_edit.jsonnet [gpu_gb=48 seed=1 ...]
(import 'qwen_image_edit.jsonnet') + {
  world_size: 1,
  gpu_gb: 24,
  prompts_per_iteration: 8,
  policy: {
    type: 'qwen3_vl',
    // 'Qwen/Qwen3-VL-4B-Instruct' needs gpu_gb=48; on 24 GB it is tight, with renderer.batch_size=1 and
    // engine.enforce_eager=true.
    model_path: 'Qwen/Qwen3-VL-2B-Instruct',
    dtype: 'bfloat16',
    lora: { r: 32, alpha: 64, target_modules: ['q_proj', 'k_proj', 'v_proj', 'o_proj'] },
    system_prompt:
      'You write instructions for an image editor. Look at the picture and at what the user asks for. '
      + 'Write one instruction that says what to change, how it must look, and what must stay as it is. '
      + 'Name objects, colours and places as you see them. Write nothing else.',
    image_max_pixels: 512 * 32 * 32,  // 32 x 32 pixels are one token
    max_prompt_tokens: 1024,
  },
  renderer: {
    type: 'diffusers',
    model_path: 'black-forest-labs/FLUX.2-klein-4B',
    pipeline: 'Flux2KleinPipeline',
    num_steps: 4,
    // A picture has its source's shape, at most 1024 x 1024 px; height_px and width_px fix its size.
    residency: if $.gpu_gb >= 48 then 'device' else 'host',
    batch_size: if $.gpu_gb >= 48 then 8 else 4,  // a group, or half of one
  },
  optimizer+: {
    backend: 'torch',
    zero_stage:: null,  // one rank shards nothing
    gradient_checkpointing: true,
  },
  tracking+: { wandb_project: 'one_card_edit' },
}
