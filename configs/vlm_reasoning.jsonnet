// Reasoning: Qwen2.5-VL-3B looks at a picture, writes a thought and an answer; right answers in the
// required form are rewarded. No renderer and no judge. Meant for 2 GPUs of 80 GB.
//
//   export APP__BASE_EXP_DIR=runs APP__RUN_NAME=my-run
//   rl train configs/vlm_reasoning.jsonnet [seed=1 ...]
//
// About 7.7 thousand questions with checked answers; the set has one split, and its last 100 rows are
// held out here. Any other set: a `path` on the hub, or a parquet or JSONL file, and its own columns.
// `source_optional: true` among them lets rows have no picture.
local open_r1(rows) = {
  type: 'hf_dataset',
  path: 'lmms-lab/multimodal-open-r1-8k-verified',
  split: 'train' + rows,
  columns: { instruction: 'problem', source: 'image', hidden: { answer: 'solution' } },
};

(import 'base.libsonnet') + {
  run_name: std.extVar('APP__RUN_NAME'),
  base_exp_dir: std.extVar('APP__BASE_EXP_DIR'),
  num_epochs: 1,
  world_size: 2,
  gpu_gb: 80,
  prompts_per_iteration: 8 * $.world_size,
  generations_per_prompt: 8,

  policy: {
    type: 'qwen2_5_vl',
    model_path: 'Qwen/Qwen2.5-VL-3B-Instruct',
    dtype: 'bfloat16',
    lora: { r: 16, alpha: 32, target_modules: ['q_proj', 'v_proj'] },
    system_prompt:
      'Look at the picture, if there is one, and answer the question. First reason step by step '
      + 'inside <think> and </think>. Then write the final answer alone, as short as it can be, '
      + 'inside <answer> and </answer>. Write nothing else.',
    // 28 x 28 pixels are one token: at most 1024 for the picture, the rest for the words.
    image_max_pixels: 1024 * 28 * 28,
    max_prompt_tokens: 2048,
    // Records and the page show thought and answer separately; a completion without the tag is graded
    // unchanged.
    thought: { instruction: '', marker: '</think>', without_marker: 'words' },
  },
  engine: { type: 'vllm', gpu_memory_utilization: 'auto' },
  renderer: { type: 'none' },
  rewards: { accuracy: { type: 'accuracy' }, format: { type: 'format' } },
  data+: {
    train: [open_r1('[:-100]')],
    validation: [open_r1('[-100:]')],
    on_bad_row: 'skip',
  },

  sampling+: { max_completion_tokens: 1024 },
  optimizer+: {
    zero_stage: 3,
    max_tokens_per_micro_batch: 12288,  // one group: 2048 + 8 x 1024 at the most
    gradient_checkpointing: if $.gpu_gb >= 80 then false else 'mlp',
  },
  evaluation+: { every_n_iterations: 50, num_samples: 100 },
  checkpoint+: { save_every_n_iterations: 25 },
  tracking+: { wandb: 'offline', wandb_project: 'vlm_reasoning' },
}
