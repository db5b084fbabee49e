// Shared by the tiny systems: a small run in one process, on the CPU even if there is a GPU.
(import 'base.libsonnet') + {
  base_exp_dir: 'runs',
  prompts_per_iteration: 12,
  generations_per_prompt: 8,
  // In float32 on the CPU, as the results in README.md: a GPU would bring other rounding, and vLLM has no
  // float32 adapters there.
  policy: { device: 'cpu', dtype: 'float32' },
  engine: { type: 'auto' },  // vLLM's CPU build; 'transformers' where vLLM is built for GPUs
  optimizer+: {
    backend: 'torch',  // one process has nothing to shard, and starts faster without DeepSpeed
    final_lr_fraction: 0.2,
    warmup_iterations: 4,
    betas: [0.9, 0.99],
    max_grad_norm: 0.1,
    max_tokens_per_micro_batch: 2048,
  },

  small_lora:: {
    r: 8,
    alpha: 16,
    target_modules: [
      'q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj',
    ],
  },
  pixel_judge:: {
    start_command: ['{python}', '-m', 'tiny_world.judge_server', '{url_file}', '{model}'],
    model: 'tiny-world-judge',
    image_side_px: 64,
    max_concurrency: 8,  // threads of one small server: more would slow each other down
    audit: 'off',  // it reads pixels; quickstart.jsonnet shows what an audit does
  },
}
