// A stock pipeline of diffusers as the editor, conditioned on the policy's text: a tiny FLUX.2-klein, which
// understands only instructions like "turn the red square green.". Users write "paint the square the color of
// grass". A tiny Qwen2.5-VL, which sees the picture, learns to rewrite that. A run takes minutes on two CPU cores.
//
//   rl train configs/tiny_stock_editor.jsonnet
(import 'tiny.libsonnet') + {
  run_name: 'tiny_stock_editor',
  num_iterations: 30,

  policy+: {
    type: 'qwen2_5_vl',
    model_path: 'pkg://tiny_world/weights/policy',
    lora: $.small_lora,
    // The policy's supervised fine-tuning used this prompt.
    system_prompt: "Describe the key features of the input image (color, shape, size, texture, objects, background), then explain how the user's text instruction should alter or modify the image. Generate a new image that meets the user's requirements while maintaining consistency with the original input where appropriate.",
    max_prompt_tokens: 256,
  },
  renderer: {
    type: 'diffusers',
    model_path: 'pkg://tiny_world/weights/klein',
    pipeline: 'Flux2KleinPipeline',
    dtype: 'float32',
    num_steps: 4,
    height_px: 64,
    width_px: 64,
    // The text encoder has two layers (0 is the embedding), and was trained with prompts padded to 32 tokens.
    arguments: { guidance_scale: 1.0, max_sequence_length: 32, text_encoder_out_layers: [0, 1, 2] },
    batch_size: 16,
  },
  rewards: { viescore: { type: 'viescore' } },
  judge+: $.pixel_judge,
  data+: {
    train: [{ type: 'tiny_world.data.shapes', num_samples: 4096, seed: 1 }],
    validation: [{ type: 'tiny_world.data.shapes', num_samples: 64, seed: 2, held_out: true }],
  },

  sampling+: { max_completion_tokens: 24 },
  // As in quickstart.jsonnet, which gives the reasons.
  algorithm+: { kl_coeff: 0.2, advantage_eps: 0.1 },
  optimizer+: { learning_rate: 2.5e-3, betas: [0.5, 0.99] },
  evaluation+: { every_n_iterations: 15, num_samples: 64 },
  checkpoint+: { save_every_n_iterations: 15 },
}
