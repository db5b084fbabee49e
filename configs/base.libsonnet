// Every key of a run, with its default. A run's config is `(import 'base.libsonnet') + { ... }`;
// the keys marked (required) have no default and must be there. What a plugin's own section takes
// is in `class Config` of its file: `renderer: { type: 'qwen_image_edit' }` is read by
// rl/renderers/qwen_image_edit.py. Unknown keys are refused. Times are in s, lengths in tokens.
{
  // Version of the config's keys; any but the present version is refused.
  format: 3,
  // Names the run folder, the wandb page and the resume point; letters, digits, '.', '_', '-', at
  // most 200.
  // run_name: (required)
  // Runs live in <base_exp_dir>/<run_name>/.
  // base_exp_dir: (required)
  // Everything random derives from it (Jsonnet numbers are exact below 2^53).
  seed: 0,
  // Iterations (one batch of rollouts each); set either this or num_epochs.
  num_iterations: null,
  // Passes over the training mixture.
  num_epochs: null,
  // Prompts per iteration over all ranks.
  // prompts_per_iteration: (required)
  // G, completions per prompt (a group).
  // generations_per_prompt: (required)
  // Weight updates that rollouts may lag behind. 0: strictly on-policy. 1: the next iteration is
  // sampled and rendered while the judge grades this one, which hides the judge's latency; the
  // policy ratio approximately corrects for that (`policy/ratio_mean`, `policy/clip_fraction`).
  max_staleness: 0,
  // Pictures rendered per completion (different noise); their rewards are averaged.
  images_per_completion: 1,
  // The run stops (checkpoint saved) when the renderer fails to draw more than this share of the
  // last 200 pictures.
  max_render_failure_rate: 0.05,
  // Also render and grade the user's own words under the same noise, one picture per prompt:
  // `reward_gain` is the policy's reward minus that picture's. always: in training and on held-out
  // data; evaluation: on held-out data only. Never trained on.
  bare_arm: 'always',
  // Ranks (processes, GPUs) over all nodes; `rl train` starts as many unless given --nproc.
  world_size: 1,
  // The run ends (checkpoint saved, every rank's stacks in its log) when a rank has made no
  // progress for this many seconds, or its process is stopped. Choose more than the longest single
  // call takes, e.g. a compile. The judge has limits of its own (`judge.*`).
  hang_limit_s: 1800,
  // GPU memory the config is written for, GB (1e9 bytes; H200: 141, H100: 80): `rl check` plans for
  // it, and a file may derive other keys from it. A start plans for the GPUs it finds.
  gpu_gb: 141,
  // commercial: a run refuses each model, judges' too, whose licence rules out commercial use or is
  // not known (docs/models.md). `rl check` lists the licences.
  license: 'any',
  // Hub ids, folders and judges' names whose owners allow you this use, as you have read or agreed:
  // they are not refused.
  licensed_models: [],
  // The model that is trained: a plugin of rl/policies.
  // policy: (required)
  // What samples completions: a plugin of rl/engines. type 'auto': 'vllm' where the installed build
  // runs on policy.device, else 'transformers'.
  // engine: (required)
  // What draws the pictures: a plugin of rl/renderers.
  // renderer: (required)
  // Name -> a plugin of rl/rewards. Any of them also takes `judge`, a judge of its own, and
  // `held_out_only` (docs/judge.md).
  // rewards: (required)
  // How the values of the rewards are combined into the final reward, in [0, 1].
  final_reward: {
    // weighted_sum: sum(w x) / sum(w); geometric_mean: prod(x^w)^(1/sum(w)).
    op: 'weighted_sum',
    // Reward name (or `<reward>/<part>` for parts scaled 0..1) -> weight; {} = 1 for every reward
    // that is not diagnostic (a reward that is only logged; its entry says so).
    weights: {},
  },

  // Where samples come from. Each mixture entry is a plugin section plus `weight` (default 1) or
  // `coefficient` (weight = coefficient x its rows; if all are 1, all rows are equally likely).
  data: {
    // Weighted mixture: entry i is drawn with probability weight_i / sum.
    // train: (required)
    // Held-out mixture, in order, for evaluation.
    validation: [],
    // A missing or corrupt image, an absurd size, an empty instruction: stop, or skip and count.
    on_bad_row: 'error',
  },

  // How completions are sampled. Unmodified sampling (top_p 1, top_k -1) keeps GRPO on-policy.
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
    // A shipped loss, or the dotted path of your own function (example: docs/plugins.md). grpo:
    // clipped ratio, mean over each completion's tokens, then over completions; dapo: mean over all
    // tokens of the step; dr_grpo: sum over tokens / (completions x max_completion_tokens); gspo:
    // grpo with one ratio per completion; cispo: importance weight, detached and bounded above,
    // times log-prob, mean over all tokens.
    loss: 'dapo',
    // Lower clip distance of the ratio; 'cispo' has none.
    clip_low: 0.2,
    // Upper clip distance of the ratio (DAPO: 0.28).
    clip_high: 0.2,
    // Weight of KL(policy || reference); 0 = no reference pass at all.
    kl_coeff: 0.0,
    // start: the policy before this run's first iteration; base: the base model, which is another
    // one where the run starts from an adapter (policy.adapter_path).
    kl_reference: 'start',
    // Per-token estimator (Schulman 2020, 'Approximating KL divergence').
    kl_estimator: 'k3',
    // loss: added to the loss; reward: subtracted from the advantage, token by token.
    kl_placement: 'loss',
    // Truncated importance weight pi_trainer / pi_engine, since their log-probs differ slightly.
    importance_correction: 'token',
    // Upper bound of that weight.
    importance_cap: 2.0,
    // Groups whose rewards are all equal: they have no policy gradient. kl_only: their KL stays in
    // the loss, whose denominators leave them out, so that the gradient keeps its size; keep: the
    // denominators count them as well; drop: their KL is left out too.
    zero_spread_groups: 'kl_only',
    // A completion that hit max_completion_tokens. floor: its reward is 0; mask: graded, but not in
    // the loss; score: graded and in the loss.
    truncated_completions: 'score',
    // For a control run: rewards permuted over the whole batch; such a run must not learn.
    shuffle_rewards: false,
  },

  // The optimizer: which backend holds its state, and how it updates the weights.
  optimizer: {
    // torch: plain PyTorch (gradients summed over ranks); deepspeed: ZeRO.
    backend: 'deepspeed',
    // DeepSpeed ZeRO stage; ignored by backend torch. 0 shards nothing. 1 for adapters: one
    // reduction a step. 2 for full fine-tuning in bfloat16: it shards gradients, and reduces them
    // in every backward. 3 also shards the weights, and gathers them in every layer.
    zero_stage: 2,
    // Peak AdamW learning rate.
    learning_rate: 1e-5,
    // Last iteration's learning rate divided by the peak; linear decay between (1 = constant).
    final_lr_fraction: 1.0,
    // Linear warm-up, iterations.
    warmup_iterations: 0,
    // Decay rates of AdamW's two moments.
    betas: [0.9, 0.95],
    // AdamW epsilon.
    adam_eps: 1e-8,
    // AdamW decoupled weight decay, of matrices only: not norms, biases, embeddings, tied heads.
    weight_decay: 0.0,
    // Global gradient-norm clip.
    max_grad_norm: 1.0,
    // Token limit of one forward/backward on a rank: whole groups, each prompt counted once. A
    // longer group is split between completions; each part then repeats the prompt.
    max_tokens_per_micro_batch: 8192,
    // Tokens whose rollout forward is kept for the backward, which saves a second forward (only
    // where that is exact: first update, no dropout, not ZeRO-3, max_staleness 0). null = all
    // tokens of the iteration; fewer need less memory.
    max_kept_tokens: null,
    // Optimizer steps per batch of rollouts; the batch is split into that many parts by group.
    updates_per_iteration: 1,
    // Recompute activations in the backward. true: whole layers; least memory, a third more
    // compute. 'mlp': only inside MLPs; a quarter of the memory of false, a sixth more compute.
    gradient_checkpointing: false,
  },

  // The OpenAI-compatible endpoint that rewards ask.
  judge: {
    // URL with or without /v1, or a file that holds one. Several URLs (a list, comma-separated, or
    // one per line in the file) serve one judge: a question goes to the least busy that is up. '' =
    // no judge, or start_command starts one that writes its URL.
    api_base: '',
    // Arguments of a command that starts the judge on every node before models are loaded; it is
    // stopped when the run ends; [] = no command. {python} is the trainer's Python, {model} is
    // judge.model, {url_file} a file into which the command writes its URL; without {url_file} it
    // answers at api_base. Its output: <run>/logs/judge_0.log (0: the node's first rank).
    start_command: [],
    // How long a judge that start_command starts may take until it answers, s.
    start_timeout_s: 600.0,
    // Model name sent with every request.
    model: 'Qwen/Qwen3-VL-32B-Instruct-FP8',
    // Which weights the endpoint serves under that name, for example a commit or a date. It is sent
    // nowhere: it tells audits of different weights apart.
    revision: '',
    // NAME of the environment variable that holds the key ('' = none); the key itself is never
    // written anywhere.
    api_key_env: '',
    // Requests in flight per rank, over all of api_base together.
    max_concurrency: 32,
    // Timeout of one request, s.
    timeout_s: 120.0,
    // Limit of tries per question. Transport errors and unreadable replies count; a reply that asks
    // to wait (HTTP 429, or 408, 425, 5xx with Retry-After) does not.
    max_attempts: 6,
    // Judge sampling temperature of the first try; a retry after an unreadable reply adds 0.3.
    temperature: 0.0,
    // Longest judge reply, tokens.
    max_tokens: 512,
    // Images are downscaled to a longer side of at most this; a side below 28 is padded.
    image_side_px: 768,
    // When the reply's JSON schema is sent as `response_format`. on_retry: after an unreadable
    // reply; for endpoints that support it (vLLM and OpenAI do).
    guided_json: 'never',
    // How long a judge that is down, or asks to wait (as in `max_attempts`), may hold questions
    // back before they are given up as UNGRADED, s. Below 600 it shortens the pauses between tries.
    max_outage_s: 600.0,
    // What a picture counts as if no reply about it can be read after all tries (prose, a filter, a
    // refusal), while the judge answers others. lowest: the lowest rating, 0, so that a policy gains
    // nothing by such pictures. A failure of the transport (time-out, connection, HTTP 5xx or 429)
    // always leaves it UNGRADED.
    unreadable: 'ungraded',
    // The run stops (checkpoint saved) when more than this share of an iteration's episodes is
    // UNGRADED, or of a held-out evaluation's pictures for another reason than unreadable replies.
    max_failure_rate: 0.5,
    // What a run does about its judge's audit (`rl judge audit`, docs/judge.md). warn: without a
    // passed audit, console, page and model card say so; required: the run audits a judge without
    // an audit at its start, and refuses one that does not pass; off: nothing.
    audit: 'warn',
    // What an audit asks about. scenes: drawn scenes of 512 px; data: the first samples of
    // data.validation (without it: data.train) that have a target, which are closer to the run's
    // pictures.
    audit_set: 'scenes',
    // The AUROC of right against wrong results that a judge must exceed: the audit's 95 % interval
    // decides (docs/judge.md).
    audit_min_auroc: 0.85,
  },

  // Draws the renderer's pictures in actors of a Ray cluster, each with a copy of the model
  // (docs/scale.md). Worker and local renderer draw the same bits where GPU and versions agree.
  render_pool: {
    // Actors; 0 = no pool, the ranks draw; 'auto' = as many as fit into the cluster. They may join
    // and die at any time.
    workers: 0,
    // Address of the Ray cluster, 'host:port'. 'auto': this machine's (`ray start`).
    address: 'auto',
    // GPUs per worker; 0.5 = two workers share one. Ignored if the renderer's device is 'cpu' or
    // the ranks have no GPU.
    num_gpus: 1,
    // Further Ray resources per worker, for example of the nodes that may run one (`ray start
    // --resources`).
    resources: {},
  },

  // The held-out evaluation: one completion per sample, greedy by default.
  evaluation: {
    // Iterations between evaluations; one is before the first and one after the last, too. 0 =
    // never.
    every_n_iterations: 0,
    // How many samples, from the start of the validation mixture, over all ranks.
    num_samples: 64,
    // Softmax temperature; 0 = the likeliest token. Use 1 for image tokens: the likeliest ones make
    // dull pictures. The random draws depend on the sample only.
    temperature: 0.0,
    // Keep the k likeliest tokens; -1 = off.
    top_k: -1,
    // Also score the reference completions where the data has them: separates renderer drift from
    // the policy's own mistakes.
    reference_drift: true,
    // Once a run, also draw and grade the untrained system's pictures of these samples. Each
    // evaluation then reports the gain over these, and how far training has moved the renderer's
    // input. Skipped where a reward compares a group's pictures (`score_group`).
    stock_arm: true,
    // Also draw and grade what the policy writes without its thought: the gain of thinking
    // (`eval/gain_of_thought`); doubles the pictures and the questions to the judge. A reward that
    // expects a thought (`format`) finds none. Used only where `policy.thought` is set.
    thought_gain: false,
  },

  // When checkpoints are written, kept and pushed.
  checkpoint: {
    // Iterations between checkpoints from which a run can resume.
    save_every_n_iterations: 50,
    // Iterations between checkpoints kept for ever (0: none) beside the newest two and the best.
    keep_every_n_iterations: 0,
    // Iterations between pushes; 0 = never. The model goes to `main` and, after 20 iterations, to a
    // branch ckpt_000020, while training goes on. A failed push is logged, never fatal.
    push_to_hub_every_n_iterations: 0,
    // Hub repository, e.g. 'me/my-run'.
    push_to_hub_repo_id: '',
  },

  // How a run is displayed. metrics.jsonl, episode records and images are always written.
  tracking: {
    // A view of the run's record in wandb. online: while it goes on; offline: a folder for `wandb
    // sync`, without network.
    wandb: 'off',
    // wandb project name.
    wandb_project: 'rl',
    // TensorBoard's event files in <run>/tensorboard (pip install 'vlm-edit-rl[tensorboard]').
    tensorboard: false,
    // trackio's files in <run>/trackio; nothing is uploaded. `rl check` says how to install it.
    trackio: false,
    // Hub Space that gets trackio's files instead, e.g. 'me/my-runs'; a new one is private.
    trackio_space: '',
    // Iterations between episode records (text, reward parts, replies, images); 0 = never.
    log_episodes_every_n_iterations: 1,
    // Pictures written per logged iteration, over all ranks.
    images_per_iteration: 16,
    // Newest iterations whose training pictures are kept, the small ones too; records are always
    // kept. 0 = all.
    keep_images_of_last_n_iterations: 0,
    // Write <run>/report/index.html at evaluations and at the end (`rl follow`).
    page: true,
  },
}
