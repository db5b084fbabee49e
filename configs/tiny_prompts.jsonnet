// Prompt enhancement at tiny size. Users ask for "a wedge the color of plum in the lower left corner", but
// a tiny Stable Diffusion 3 understands only "purple triangle bottom left". A tiny Qwen2.5-VL learns to
// write that. The reward is a tiny CLIP's similarity of the picture and the user's own words. A run takes
// minutes on two CPU cores.
//
//   rl train configs/tiny_prompts.jsonnet
(import 'tiny.libsonnet') + {
  run_name: 'tiny_prompts',
  num_iterations: 60,

  policy+: {
    type: 'qwen2_5_vl',
    model_path: 'pkg://tiny_world/weights/rewriter',
    lora: $.small_lora,
    system_prompt: 'Say in plain words what the picture shows.',
    max_prompt_tokens: 64,
  },
  renderer: {
    type: 'sd3',
    model_path: 'pkg://tiny_world/weights/sd3',
    dtype: 'float32',
    num_steps: 4,
    guidance_scale: 1.0,
    height_px: 64,
    width_px: 64,
    use_t5: false,
    max_t5_tokens: 1,
    batch_size: 16,
  },
  rewards: {
    // This CLIP gives right pictures a cosine near 1, so the scale is 1.
    clip: { type: 'clip', model_path: 'pkg://tiny_world/weights/clip', dtype: 'float32', scale: 1.0 },
  },
  data+: {
    train: [{ type: 'tiny_world.data.shape_prompts', num_samples: 4096, seed: 1 }],
    validation: [{ type: 'tiny_world.data.shape_prompts', num_samples: 72, seed: 2, held_out: true }],
  },

  sampling+: { max_completion_tokens: 12 },
  algorithm+: { kl_coeff: 0.03, advantage_eps: 0.1 },
  optimizer+: { learning_rate: 4e-3 },
  evaluation+: { every_n_iterations: 15, num_samples: 72 },
  checkpoint+: { save_every_n_iterations: 30 },
}
