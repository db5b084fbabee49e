// Every key of a run, with its default. A run's config is `(import 'base.libsonnet') + { ... }`;
// the keys marked (required) have no default and must be there. What a plug's own section takes
// stands in `class Config` of its file: `renderer: { type: 'qwen_image_edit' }` is read by
// rl/renderers/qwen_image_edit.py. Unknown keys are refused. Times are in s, lengths in tokens.
{
  // Which version's keys the config is written in; another than today's is refused.
  format: 3,
  // Names the run folder, the wandb page and the resume point; letters, digits, '.', '_', '-', at
  // most 200.
  // run_name: (required)
  // Runs live in <base_exp_dir>/<run_name>/.
  // base_exp_dir: (required)
  // Everything random derives from it (Jsonnet numbers are exact below 2^53).
  seed: 0,
  // Iterations (one batch of rollouts each); exactly one of this and num_epochs.
  num_iterations: null,
  // Passes over the training mixture.
  num_epochs: null,
  // Prompts per iteration over all ranks.
  // prompts_per_iteration: (required)
  // G, completions per prompt (a group).
  // generations_per_prompt: (required)
  // Weight updates that rollouts may lag behind. 0: strictly on-policy. 1: while the judge reads one
  // iteration's pictures the next is sampled and rendered, and the ratio corrects for the one update
  // between (an approximation; `policy/ratio_mean` and `policy/clip_fraction` say how far it moved);
  // hides any judge latency below an iteration's time.
  max_staleness: 0,
  // Pictures rendered per completion (different noise); their rewards are averaged.
  images_per_completion: 1,
  // The run stops (checkpoint saved) when the renderer fails to draw more than this share of the last
  // 200 pictures; whom the judge fails is `judge.max_failure_rate`'s.
  max_render_failure_rate: 0.05,
  // Also render and grade the user's own words under the same noise, one picture per prompt, so
  // that `reward_gain` shows what the policy's writing is worth: in training and on held-out data,
  // there only, or not at all. Never trained on.
  bare_arm: 'always',
  // Ranks (processes, GPUs) over all nodes; simple_launch starts as many unless told --nproc.
  world_size: 1,
  // The run ends (checkpoint saved, every rank's stacks in its log) when a rank has been at one place
  // in the code for so long, or its process does not run at all; it is named within a minute. Above
  // the longest single call: a compile, a file fetched or read slowly. The wait for a judge has limits
  // of its own (`judge.*`).
  hang_limit_s: 1800,
  // GPU memory the config is written for, GB (1e9 bytes; H200: 141, H100: 80): what --check plans for,
  // and what a file may derive other keys from. A start plans for the GPUs it finds, and says where
  // they are others; `--gpu-gb 80` is `gpu_gb=80`, and a start held to it.
  gpu_gb: 141,
  // A plug of rl/policies.
  // policy: (required)
  // A plug of rl/engines; type 'auto': 'vllm' where the installed build runs on policy.device, else
  // 'transformers'.
  // engine: (required)
  // A plug of rl/renderers.
  // renderer: (required)
  // Name -> a plug of rl/rewards.
  // rewards: (required)
  // How rewards' values become the one number in [0, 1].
  final_reward: {
    // weighted_sum: sum(w x) / sum(w); geometric_mean: prod(x^w)^(1/sum(w)).
    op: 'weighted_sum',
    // Reward name (or `<reward>/<part>` for parts scaled 0..1) -> weight; {} = 1 for every reward
    // that is not a mere diagnostic.
    weights: {},
  },

  // Where samples come from. Each mixture entry is a plug section plus `weight` (default 1), or
  // `coefficient`: its weight is then coefficient x its rows, 1 for all = one big heap.
  data: {
    // Weighted mixture: entry i is drawn with probability weight_i / sum.
    // train: (required)
    // Held-out mixture, in order, for evaluation.
    validation: [],
    // A missing or corrupt image, an absurd size, an empty instruction, more source pictures than
    // the renderer and the policy read: stop, or skip and count.
    on_bad_row: 'error',
    // A picture with a longer side, or of more than 50 million pixels, is a bad row.
    max_image_side_px: 8192,
  },

  // How completions are drawn. Unmodified sampling (top_p 1, top_k -1) keeps GRPO on-policy.
  sampling: {
    // Softmax temperature; the trainer divides its logits by the same number.
    temperature: 1.0,
    // Nucleus mass; 1 = off.
    top_p: 1.0,
    // Keep the k likeliest tokens; -1 = off.
    top_k: -1,
    // Longest completion, tokens, stop token included.
    max_completion_tokens: 256,
  },

  // GRPO and its published variations; each is a pure function in `rl/algorithm`.
  algorithm: {
    // Divisor of the centred rewards (GRPO: group_std; Dr.GRPO: none; LitePPO: batch_std).
    advantage_scale: 'group_std',
    // Added to that standard deviation, in reward units (0..1).
    advantage_eps: 1e-4,
    // A shipped one, or the dotted path of a function of your own, 'my_package.my_loss'.
    // grpo: clipped ratio, mean over each completion's tokens, then over completions; dapo: the same,
    // mean over all tokens of the step; dr_grpo: the same, sum over tokens / (completions x
    // max_completion_tokens); gspo: grpo with one ratio per completion; cispo: importance weight,
    // detached and bounded above alone, times log-prob, mean over all tokens.
    loss: 'dapo',
    // Lower clip distance of the ratio; 'cispo' has none.
    clip_low: 0.2,
    // Upper clip distance of the ratio (DAPO: 0.28).
    clip_high: 0.2,
    // Weight of KL(policy || reference); 0 = no reference pass at all.
    kl_coeff: 0.0,
    // Per-token estimator (Schulman 2020, 'Approximating KL divergence').
    kl_estimator: 'k3',
    // loss: added to the loss; reward: subtracted from the advantage, token by token.
    kl_placement: 'loss',
    // Truncated importance weight pi_trainer / pi_sampler against training-inference mismatch.
    importance_correction: 'token',
    // Upper bound of that weight.
    importance_cap: 2.0,
    // Groups whose rewards are all equal, of which the policy gradient learns nothing. kl_only: their
    // KL stays in the loss, whose denominators do not count them, so that the gradient keeps its
    // size; keep: they are counted as well; drop: their KL goes with them, and what holds the
    // wording of a group that fails as a whole is gone.
    zero_spread_groups: 'kl_only',
    // A completion that hit max_completion_tokens: reward policy_failed_reward | graded but out of
    // the loss | graded as it is.
    truncated_completions: 'score',
    // Reward of an episode whose completion cannot be used.
    policy_failed_reward: 0.0,
    // Control arm: rewards permuted over the whole batch; such a run must not learn.
    shuffle_rewards: false,
  },

  // The learner: what holds the state, and how it steps.
  optimizer: {
    // torch: plain PyTorch (gradients summed over ranks); deepspeed: ZeRO.
    backend: 'deepspeed',
    // DeepSpeed ZeRO stage; ignored by backend torch. 0 shards nothing, as backend torch. 1 for
    // adapters: one reduction a step, and no rank waits for another before it. 2 for full fine-tuning
    // in bfloat16: it shards gradients, and reduces them in every backward. 3 shards the weights as
    // well, and gathers them in every layer.
    zero_stage: 2,
    // Peak AdamW learning rate.
    learning_rate: 1e-5,
    // Learning rate at the last iteration over the peak; linear decay in between (1 = constant).
    final_lr_fraction: 1.0,
    // Linear warm-up, iterations.
    warmup_iterations: 0,
    // AdamW moments' decay.
    betas: [0.9, 0.95],
    // AdamW epsilon.
    adam_eps: 1e-8,
    // AdamW decoupled weight decay, of matrices alone: not of norms, biases and embeddings, nor of
    // a head that is tied to one.
    weight_decay: 0.0,
    // Global gradient-norm clip.
    max_grad_norm: 1.0,
    // Tokens of one forward/backward on one rank: whole groups, each prompt counted once. A group
    // that is longer is cut between completions, its prompt once per piece.
    max_tokens_per_micro_batch: 8192,
    // Tokens whose rollout forward is kept for the backward, so that the learner runs no second one
    // (exact; used where it is: first update, no dropout, not ZeRO-3, max_staleness 0). null = all
    // of the iteration's, 0 = none; less memory.
    max_kept_tokens: null,
    // Optimiser steps per batch of rollouts; the batch is split by group into that many minibatches.
    updates_per_iteration: 1,
    // Recompute activations in the backward. true: whole layers, about a third more compute for the
    // least memory; 'mlp': only the MLPs' insides, a quarter of the memory of false for a sixth more
    // compute.
    gradient_checkpointing: false,
  },

  // The OpenAI-compatible endpoint that rewards ask.
  judge: {
    // URL with or without /v1, or a file that holds one. Several (a list, between commas, a line each
    // in the file) are one judge at several places: a question goes where the fewest are in flight,
    // and elsewhere when one is down. '' = no judge, or one that start_command starts and that says
    // itself where it is.
    api_base: '',
    // Words of a command that starts the judge once on every node, before models are loaded, and
    // that is ended with the run; [] = nothing is started. In them {python} is the Python that runs
    // this, {model} is judge.model, and {url_file} a file into which the command writes one line,
    // its URL. Without {url_file} it answers at api_base. What it prints goes to
    // <run>/logs/judge_0.log (0: the node's first rank).
    start_command: [],
    // How long a judge that start_command starts may take until it answers, s.
    start_timeout_s: 600.0,
    // Model name sent with every request.
    model: 'Qwen/Qwen2.5-VL-72B-Instruct',
    // NAME of the environment variable that holds the key ('' = none); the key itself is never
    // written anywhere.
    api_key_env: '',
    // Requests in flight per rank, over all of api_base together.
    max_concurrency: 32,
    // Per request, s.
    timeout_s: 120.0,
    // Tries per question, transport errors and unreadable replies together, but not an answer that
    // asks to wait (HTTP 429, or any Retry-After).
    max_attempts: 6,
    // First pause; doubles per try, with jitter, up to 30 s; Retry-After is honoured.
    backoff_s: 1.0,
    // This many transport failures in a row open the circuit breaker.
    breaker_failures: 20,
    // How long an open breaker holds requests back before one is let through, s.
    breaker_pause_s: 15.0,
    // Judge sampling temperature of the first try; a retry after an unreadable reply adds 0.3.
    temperature: 0.0,
    // Longest judge reply, tokens.
    max_tokens: 512,
    // Images are downscaled so that their longer side is at most this. A question shows all source
    // pictures of a sample and the result: the judge's server must take as many.
    image_side_px: 768,
    // When the reply's JSON schema is sent as `response_format`. on_retry: after an unreadable
    // reply; for endpoints that take it (vLLM and OpenAI do).
    guided_json: 'never',
    // How long an open breaker, or a judge that asks to wait (HTTP 429, or any Retry-After), may
    // hold questions back before they are given up as UNGRADED, s.
    max_outage_s: 600.0,
    // The run stops (checkpoint saved) when more than this share of an iteration's episodes is
    // UNGRADED.
    max_failure_rate: 0.5,
  },

  // The held-out run of the same rollout: one completion per sample, greedy by default.
  evaluation: {
    // 0 = never; else before the first iteration, every n, and after the last.
    every_n_iterations: 0,
    // First samples of the validation mixture, over all ranks.
    num_samples: 64,
    // Softmax temperature; 0 = the likeliest token. Image tokens want 1: their likeliest are dull.
    // Draws depend on the sample alone.
    temperature: 0.0,
    // Keep the k likeliest tokens; -1 = off.
    top_k: -1,
    // Also score the reference completions where the data has them: separates renderer drift from
    // the policy's own mistakes.
    reference_drift: true,
    // Also draw and grade what the untrained system makes of the user's words, once a run, and tell
    // at each held-out run what is gained over it and how far training has moved what the renderer
    // reads. Drawn as every picture of the run is: with the stock pipeline's settings in `renderer`,
    // it is the stock pipeline. Not where a reward compares a group's pictures (`score_group`).
    stock_arm: true,
    // Also let the policy write each sample's words with its thought cut before it begins, and draw
    // and grade them: what thinking is worth (`eval/gain_of_thought`), for as much again as the
    // completions' own pictures and questions. A reward that wants a thought (`format`) finds none in
    // them. Read where `policy.thought` is set.
    thought_gain: false,
  },

  // What is written, how often, and what stays.
  checkpoint: {
    // Resume points.
    save_every_n_iterations: 50,
    // Of those, which stay for ever; 0 = only the newest two, and the best on held-out samples.
    keep_every_n_iterations: 0,
    // 0 = never; a failed push is logged, never fatal.
    push_to_hub_every_n_iterations: 0,
    // Hub repository, e.g. 'me/my-run'.
    push_to_hub_repo_id: '',
  },

  // What one sees. metrics.jsonl, episode records and images are always written.
  tracking: {
    // wandb is a view of the record; a run never needs the network.
    wandb: 'off',
    // wandb project name.
    wandb_project: 'rl',
    // TensorBoard's event files in <run>/tensorboard (pip install 'vlm-edit-rl[tensorboard]').
    tensorboard: false,
    // trackio's files in <run>/trackio; nothing leaves. `rl check` says how it is installed.
    trackio: false,
    // Space of the hub that trackio keeps them in instead, e.g. 'me/my-runs', private if made.
    trackio_space: '',
    // Episode records (text, parts, replies, images); 0 = never.
    log_episodes_every_n_iterations: 1,
    // Pictures written per logged iteration, over all ranks.
    images_per_iteration: 16,
    // Training's pictures of older iterations are deleted, their records stay; 0 = all stay.
    keep_images_of_last_n_iterations: 0,
    // One group on the console, to be read: the instruction, the best, the worst and one completion
    // between, their parts, the judge's words; 0 = never.
    show_group_every_n_iterations: 10,
    // Refresh <run>/report/index.html at held-out runs and at the end, by a process of its own.
    page: true,
  },
}
