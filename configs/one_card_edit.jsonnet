// Image editing on one GPU of 24 GB: Qwen3-VL-2B sees the picture and rewrites the request, and
// FLUX.2-klein-4B, a stock pipeline of diffusers, edits the picture from this text in 4 steps. vLLM
// sleeps while renderer and trainer work. The pipeline's weights (16 GB) are in host memory; its parts
// are moved to the GPU one at a time while it draws. The machine needs 27 GB of host memory. The judge
// runs elsewhere. docs/gpu.md has memory, downloads and an estimate of the hours.
//
// Every model is under Apache-2.0, so `license=commercial` passes. The data, Complex-Edit, are not for
// commercial use; give your own. We have not tried it with the released weights.
//
//   export APP__BASE_EXP_DIR=runs APP__RUN_NAME=my-run
//   export APP__REWARD_FUNCTION_API_BASE=http://judge-host:4877
//   rl train configs/one_card_edit.jsonnet [gpu_gb=48 seed=1 ...]
(import 'qwen_image_edit.jsonnet') + {
  world_size: 1,
  gpu_gb: 24,
  prompts_per_iteration: 8,
  policy: {
    type: 'qwen3_vl',
    // 'Qwen/Qwen3-VL-4B-Instruct' wants gpu_gb=48. With renderer.batch_size=1 and
    // engine.enforce_eager=true it fits 24 GB, with little to spare.
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
    // A picture has its source's shape and at most 1024 x 1024 px, unless height_px and width_px are set.
    residency: if $.gpu_gb >= 48 then 'device' else 'host',
    batch_size: if $.gpu_gb >= 48 then 8 else 4,  // a whole group of 8 completions, or half of it
  },
  optimizer+: {
    backend: 'torch',
    zero_stage:: null,  // one rank shards nothing
    gradient_checkpointing: true,
  },
  tracking+: { wandb_project: 'one_card_edit' },
}
