// EARL (arXiv 2508.01119): Emu3 reads a picture as tokens and writes the edited one as tokens. Shared
// by its ten configs (configs/sft_*__rl_*.jsonnet), for 4 GPUs of 80 GB; the judge
// (JUDGE_MODEL=Qwen/Qwen2.5-VL-72B-Instruct scripts/serve_judge.sh) runs elsewhere.
// scripts/setup_datasets.sh fetches the data.
//
//   export APP__DATA_DIR=RL_DATASETS/data APP__BASE_EXP_DIR=RL_EXPERIMENTS
//   export APP__RUN_NAME=sft_s__rl_sc APP__REWARD_FUNCTION_API_BASE=http://judge-host:4877
//   rl train --nproc 4 configs/sft_s__rl_sc.jsonnet
(import '../base.libsonnet') + {
  run_name: std.extVar('APP__RUN_NAME'),
  base_exp_dir: std.extVar('APP__BASE_EXP_DIR'),
  seed: 42,
  num_iterations: 2000,
  world_size: 4,
  gpu_gb: 80,
  prompts_per_iteration: 16,
  generations_per_prompt: 8,

  policy: {
    type: 'emu3',
    // model_path: in the part that says which SFT model is trained
    tokenizer_path: 'BAAI/Emu3-Gen',
    assistant_prefill: '<|image start|>',
    lora: null,  // every weight is trained
    max_prompt_tokens: 1280,  // a 256x256 picture is 1065
  },
  // EARL's context of 3000: 1280 for the prompt, the rest for the picture (1065 tokens).
  engine: { type: 'vllm', gpu_memory_utilization: 'auto', max_model_len: 3000 },
  renderer: { type: 'emu3_vq' },
  rewards: { viescore: { type: 'viescore' } },
  // For sqrt(perceptual quality x ground score) instead:
  //   rewards+: { ground_score: { type: 'ground_score' } },
  //   final_reward: { op: 'geometric_mean', weights: { 'viescore/pq_01': 1, ground_score: 1 } },
  judge+: {
    api_base: std.extVar('APP__REWARD_FUNCTION_API_BASE'),
    model: 'Qwen/Qwen2.5-VL-72B-Instruct',
    max_tokens: 1400,
  },
  data+: {
    // train: in the part that says which edits
    validation: [{
      type: 'emu3_tokens',
      path: std.extVar('APP__DATA_DIR')
            + '/validation_22march_256/feature/list/tokenized_datalist.json',
    }],
  },

  sampling+: { max_completion_tokens: 1720 },
  algorithm+: {
    loss: 'dapo',  // EARL's mean is over tokens
    kl_coeff: 3e-4,
    advantage_eps: 1e-5,  // EARL's 1e-4 on rewards from 0 to 10
    zero_spread_groups: 'keep',
    truncated_completions: 'floor',
  },
  optimizer+: {
    learning_rate: 3e-6,
    betas: [0.9, 0.999],
    // As long as EARL's 8 rows of prompt and completion; here two groups, each with its prompt once.
    max_tokens_per_micro_batch: 8 * $.engine.max_model_len,
    // On 80 GB weights, moments and gradients leave no room for it.
    max_kept_tokens: if $.gpu_gb >= 141 then null else 0,
    gradient_checkpointing: true,
  },
  evaluation+: { every_n_iterations: 100, temperature: 1.0, top_k: 2048 },
  checkpoint+: {
    save_every_n_iterations: 100,
    // A resume point is 119 GB; the hub keeps each model, 17 GB, as a branch.
    keep_every_n_iterations: 0,
    push_to_hub_every_n_iterations: 100,
    push_to_hub_repo_id: 'imged_rl__' + $.run_name,
  },
  tracking+: { wandb: 'online', log_episodes_every_n_iterations: 5 },
}
