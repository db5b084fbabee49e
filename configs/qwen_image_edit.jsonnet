// The main job: Qwen2.5-VL writes an edit description, its hidden states condition the frozen
// Qwen-Image-Edit DiT, a VLM judge grades the picture. Meant for 8 GPUs of 141 GB (H200), or with
// `gpu_gb=80` of 80 GB (H100), where the engine sleeps while other models run; the judge
// (scripts/serve_judge.sh) runs elsewhere.
//
//   export APP__BASE_EXP_DIR=runs APP__RUN_NAME=my-run
//   export APP__REWARD_FUNCTION_API_BASE=http://judge-host:4877
//   rl train configs/qwen_image_edit.jsonnet [seed=1 ...]
local complexity = 8;  // 1 (one atomic edit) to 8 (eight of them at once)

// Complex-Edit (CC-BY-NC-4.0) is a benchmark without a train split: 531 real pictures, each with one
// instruction per complexity. Its last 32 are held out here. Do not report scores on Complex-Edit for a
// model that was trained on it.
local complex_edit(rows) = {
  type: 'hf_dataset',
  path: 'UCSC-VLAA/Complex-Edit',
  split: 'test_real' + rows,
  columns: {
    source: 'image',
    instruction: 'edit.compound.%d.compound_instruction' % (complexity - 1),
  },
};

(import 'base.libsonnet') + {
  run_name: std.extVar('APP__RUN_NAME'),
  base_exp_dir: std.extVar('APP__BASE_EXP_DIR'),
  num_epochs: 3,
  world_size: 8,
  gpu_gb: 141,
  prompts_per_iteration: 2 * $.world_size,
  generations_per_prompt: 8,

  policy: {
    type: 'qwen2_5_vl',
    model_path: 'Qwen/Qwen2.5-VL-7B-Instruct',  // tokenizer and image processor
    // Weights: the editor's own text encoder, which the DiT was trained to read; '' = model_path's.
    init_text_encoder_from: $.renderer.model_path,
    dtype: 'bfloat16',
    lora: { r: 32, alpha: 64, target_modules: ['q_proj', 'k_proj', 'v_proj', 'o_proj'] },
  },
  engine: { type: 'vllm', gpu_memory_utilization: 'auto' },
  // The stock pipeline's 50 steps with guidance; qwen_image_edit_fewstep.jsonnet renders 60 times
  // faster.
  renderer: {
    type: 'qwen_image_edit',
    model_path: 'Qwen/Qwen-Image-Edit',
    num_steps: 50,
    true_cfg_scale: 4.0,
    batch_size: 4,
  },
  rewards: { viescore: { type: 'viescore' } },
  judge+: {
    api_base: std.extVar('APP__REWARD_FUNCTION_API_BASE'),
    model: 'Qwen/Qwen3-VL-32B-Instruct-FP8',
  },
  data+: {
    train: [complex_edit('[:-32]')],
    validation: [complex_edit('[-32:]')],
  },

  algorithm+: { kl_coeff: 1e-3 },
  optimizer+: {
    zero_stage: 1,  // adapters: see base.libsonnet
    max_tokens_per_micro_batch: 8192,  // two groups: 1543 prompt tokens + 8 x 256
    gradient_checkpointing: 'mlp',
  },
  evaluation+: { every_n_iterations: 25, num_samples: 32 },
  // A checkpoint every 5 iterations (the newest two stay), one to keep every 500: an iteration takes
  // minutes, a checkpoint (0.3 GB) seconds.
  checkpoint+: { save_every_n_iterations: 5, keep_every_n_iterations: 500 },
  tracking+: { wandb: 'offline', wandb_project: 'qwen_image_edit' },
}
