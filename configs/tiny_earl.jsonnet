// EARL on a laptop: a tiny Emu3 writes edited pictures as codes, a tiny VQ decoder draws them, a judge
// compares pixels. Real classes, a few minutes on two CPU cores; no GPU, no network.
//
//   rl train configs/tiny_earl.jsonnet
(import 'tiny.libsonnet') + {
  run_name: 'tiny_earl',
  num_iterations: 50,

  policy+: {
    type: 'emu3',
    model_path: 'pkg://tiny_world/weights/emu3',
    max_prompt_tokens: 64,
  },
  renderer: {
    type: 'emu3_vq',
    model_path: 'pkg://tiny_world/weights/emu3_vq',
    dtype: 'float32',
  },
  rewards: {
    viescore: { type: 'viescore' },
    ground_score: { type: 'ground_score' },
  },
  final_reward: {
    op: 'geometric_mean',
    weights: { 'viescore/pq_01': 1, ground_score: 1 },
  },
  judge+: $.pixel_judge,
  data+: {
    train: [{ type: 'tiny_world.data.shape_tokens', num_samples: 4096, seed: 1 }],
    validation: [{ type: 'tiny_world.data.shape_tokens', num_samples: 96, seed: 2, held_out: true }],
  },

  sampling+: { max_completion_tokens: 32 },
  algorithm+: { kl_coeff: 0.02, advantage_eps: 0.1 },
  optimizer+: { learning_rate: 8e-4, max_grad_norm: 1.0 },
  // Sampled, not greedy: if two pictures are about equally likely, the greedy one flips by chance.
  evaluation+: { every_n_iterations: 10, num_samples: 96, temperature: 1.0 },
  checkpoint+: { save_every_n_iterations: 20 },
}
