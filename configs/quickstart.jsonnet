// The whole loop on a laptop: real classes at tiny size, coloured shapes, a judge that compares pixels.
// A few minutes on two CPU cores; no GPU, no network.
//
//   rl train configs/quickstart.jsonnet
(import 'tiny.libsonnet') + {
  run_name: 'quickstart',
  num_iterations: 40,

  policy+: {
    type: 'qwen2_5_vl',
    model_path: 'pkg://tiny_world/weights/policy',
    lora: $.small_lora,
    max_prompt_tokens: 256,
  },
  renderer: {
    type: 'qwen_image_edit',
    model_path: 'pkg://tiny_world/weights/editor',
    dtype: 'float32',
    num_steps: 2,
    true_cfg_scale: 1.0,
    output_area_px: 64 * 64,
    condition_area_px: 64 * 64,
    policy_image_area_px: 64 * 64,
    batch_size: 16,
  },
  rewards: { viescore: { type: 'viescore' } },
  // The judge is audited at the first start: it must tell right edits of the held-out data from wrong ones.
  judge+: $.pixel_judge { audit: 'required', audit_set: 'data' },
  data+: {
    train: [{ type: 'tiny_world.data.shapes', num_samples: 4096, seed: 1 }],
    validation: [{ type: 'tiny_world.data.shapes', num_samples: 64, seed: 2, held_out: true }],
  },

  sampling+: { max_completion_tokens: 24 },
  // A large epsilon, because the small spread of a nearly solved group is mostly rendering noise. A
  // seed collapses when Adam's momentum repeats one noisy update near the peak of the learning rate:
  // the policy loses the wording of a shape, or the hidden states that draw it, and a group in which
  // all eight completions fail has no advantage that restores them. The KL restores wording, but
  // nothing restores states. So the KL is strong, the momentum short, and the steps are small
  // (benchmarks/results/seeds.md).
  algorithm+: { kl_coeff: 0.2, advantage_eps: 0.1 },
  optimizer+: { learning_rate: 2.5e-3, betas: [0.5, 0.99] },
  evaluation+: { every_n_iterations: 10, num_samples: 64 },
  checkpoint+: { save_every_n_iterations: 20 },
}
