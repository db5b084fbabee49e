// Think, then write, at tiny size: users ask in riddles ("where hat is jade, cup matches hat, car is
// crimson, bag matches car: a disc that matches cup in the upper left corner"), a tiny Stable
// Diffusion 3 understands "green circle top left" only. A tiny Qwen2.5-VL with two layers, which are
// enough for one look-up, learns to write down both look-ups and then the caption. tiny_thinking_twin
// is the same run without a thought. Minutes on two CPU cores.
//
//   rl train configs/tiny_thinking.jsonnet
(import 'tiny.libsonnet') + {
  run_name: 'tiny_thinking',
  num_iterations: 40,
  prompts_per_iteration: 8,

  policy+: {
    type: 'qwen2_5_vl',
    model_path: 'pkg://tiny_world/weights/thinker',
    lora: $.small_lora,
    system_prompt: 'Say in plain words what the picture shows.',
    max_prompt_tokens: 96,
    thought: { instruction: 'First look up what matches what.', marker: 'Picture:' },
  },
  renderer: {
    type: 'sd3',
    model_path: 'pkg://tiny_world/weights/sd3',
    dtype: 'float32',
    num_steps: 2,
    guidance_scale: 1.0,
    height_px: 64,
    width_px: 64,
    use_t5: false,
    max_t5_tokens: 1,
    batch_size: 16,
  },
  rewards: { viescore_t2i: { type: 'viescore_t2i' } },
  judge+: $.pixel_judge,
  data+: {
    train: [{ type: 'tiny_world.data.shape_riddles', num_samples: 4096, seed: 1 }],
    validation: [{ type: 'tiny_world.data.shape_riddles', num_samples: 64, seed: 2, held_out: true }],
  },

  sampling+: { max_completion_tokens: 24 },
  algorithm+: { kl_coeff: 0.05, advantage_eps: 0.1 },
  optimizer+: { learning_rate: 3e-3, betas: [0.5, 0.99] },
  bare_arm: 'never',  // a riddle itself draws nothing
  evaluation+: { every_n_iterations: 20, num_samples: 64, stock_arm: false, thought_gain: true },
  checkpoint+: { save_every_n_iterations: 20 },
}
