// Qwen3-VL writes for Qwen-Image-2.1 by hidden states, with one source picture and with two ("give the
// square the color of the circle in picture 2"). Real classes at tiny size, minutes on two CPU cores.
//
//   rl train configs/tiny_qwen_image_21.jsonnet
(import 'tiny.libsonnet') + {
  run_name: 'tiny_qwen_image_21',
  num_iterations: 30,

  policy+: {
    type: 'qwen3_vl',
    model_path: 'pkg://tiny_world/weights/image21/policy',
    lora: $.small_lora,
    max_prompt_tokens: 128,
  },
  renderer: {
    type: 'qwen_image_21',
    model_path: 'pkg://tiny_world/weights/image21',
    dtype: 'float32',
    num_steps: 2,
    output_area_px: 64 * 64,
    condition_area_px: 64 * 64,
    policy_image_area_px: 64 * 64,
    max_pictures: 2,
    batch_size: 96,
  },
  rewards: { viescore: { type: 'viescore' } },
  judge+: $.pixel_judge,
  data+: {
    train: [{ type: 'tiny_world.data.shape_pairs', num_samples: 4096, seed: 1 }],
    validation: [{ type: 'tiny_world.data.shape_pairs', num_samples: 64, seed: 2, held_out: true }],
  },

  sampling+: { max_completion_tokens: 24 },
  // As quickstart.jsonnet, which says why.
  algorithm+: { kl_coeff: 0.2, advantage_eps: 0.1 },
  optimizer+: { learning_rate: 2.5e-3, betas: [0.5, 0.99] },
  evaluation+: { every_n_iterations: 15, num_samples: 64 },
  checkpoint+: { save_every_n_iterations: 15 },
}
