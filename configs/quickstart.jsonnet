// The whole loop on a laptop: real classes at tiny size, coloured shapes, a judge that grades pixels.
// A few minutes on two CPU cores; no GPU, no network.
//
//   python -m rl.simple_launch configs/quickstart.jsonnet
(import 'base.libsonnet') + {
  run_name: 'quickstart',
  base_exp_dir: 'runs',
  num_iterations: 40,
  prompts_per_iteration: 12,
  generations_per_prompt: 8,

  policy: {
    type: 'qwen2_5_vl',
    model_path: 'pkg://tiny_world/weights/policy',
    dtype: 'float32',
    lora: {
      r: 8,
      alpha: 16,
      target_modules: [
        'q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj',
      ],
    },
    max_prompt_tokens: 256,
  },
  engine: { type: 'vllm' },
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
  judge+: {
    start_command: ['{python}', '-m', 'tiny_world.judge_server', '{url_file}', '{model}'],
    model: 'tiny-world-judge',
    image_side_px: 64,
    max_concurrency: 8,  // threads of one small server: more only get in each other's way
  },
  data+: {
    train: [{ type: 'tiny_world.data.shapes', num_samples: 4096, seed: 1 }],
    validation: [{ type: 'tiny_world.data.shapes', num_samples: 64, seed: 2 }],
  },

  sampling+: { max_completion_tokens: 24 },
  // A large epsilon, because in a group that is nearly solved the small spread left is mostly the
  // renderer's noise, and dividing by it alone makes a run collapse.
  algorithm+: { kl_coeff: 0.1, advantage_eps: 0.1 },
  optimizer+: {
    backend: 'torch',  // one process has nothing to shard, and starts faster without DeepSpeed
    learning_rate: 4e-3,
    final_lr_fraction: 0.2,
    warmup_iterations: 4,
    betas: [0.9, 0.99],
    max_grad_norm: 0.1,
    max_tokens_per_micro_batch: 2048,
  },
  evaluation+: { every_n_iterations: 10, num_samples: 64 },
  checkpoint+: { save_every_n_iterations: 20 },
}
