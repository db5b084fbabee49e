// Prompt enhancement: Qwen2.5-VL-7B rewrites a user's prompt, Stable Diffusion 3 draws it, and CLIP
// compares the picture with the ORIGINAL prompt, never with the rewritten one. The built-in prompts are
// hard (unusual colours, impossible objects, abstract concepts, ...).
//
//   export APP__BASE_EXP_DIR=runs APP__RUN_NAME=my-run HF_TOKEN=...   (the SD3 weights are gated)
//   rl train configs/prompt_enhancement.jsonnet [seed=1 ...]
//
// One process on three GPUs: the policy on the first, SD3 on the second and CLIP on the third; SD3 and
// CLIP may use 85 % of their GPU. `one_gpu=true` puts all three on one GPU of 80 GB; `one_gpu=true
// world_size=8` does so on each of eight. The built-in prompts are text only; those of a .jsonl
// file may come with a picture (`picture_key`), which the policy then sees.
(import 'base.libsonnet') + {
  one_gpu:: false,
  gpu_gb: 80,
  local at(place) = if $.one_gpu then {} else { device: place, max_memory_gb: 0.85 * $.gpu_gb },

  run_name: std.extVar('APP__RUN_NAME'),
  base_exp_dir: std.extVar('APP__BASE_EXP_DIR'),
  num_epochs: 25,
  prompts_per_iteration: 16 * $.world_size,
  generations_per_prompt: 8,

  policy: {
    type: 'qwen2_5_vl',
    model_path: 'Qwen/Qwen2.5-VL-7B-Instruct',
    dtype: 'bfloat16',
    lora: { r: 16, alpha: 32, target_modules: ['q_proj', 'k_proj', 'v_proj', 'o_proj'] },
    system_prompt: std.rstripChars(importstr 'prompt_enhancement.txt', '\n'),
    image_max_pixels: 512 * 28 * 28,
    max_prompt_tokens: 1024,
  },
  engine: { type: 'vllm', gpu_memory_utilization: 'auto' },
  // The stock pipeline's steps and guidance at half its side length: CLIP sees 224 x 224 pixels.
  renderer: {
    type: 'sd3',
    model_path: 'stabilityai/stable-diffusion-3-medium-diffusers',
    num_steps: 28,
    guidance_scale: 7.0,
    height_px: 512,
    width_px: 512,
    batch_size: 16,
  } + at('cuda:1'),
  rewards: {
    clip: { type: 'clip', model_path: 'openai/clip-vit-base-patch32' } + at('cuda:2'),
    prompt_quality: { type: 'prompt_quality' },  // logged, not trained on
    // A judge instead of CLIP, or beside it: viescore_t2i: { type: 'viescore_t2i' }, and judge.api_base.
  },
  data+: {
    train: [{ type: 'prompts', split: 'train' }],
    validation: [{ type: 'prompts', split: 'held_out' }],
  },

  // Temperature 1, because GRPO learns from differences within a group (for use, 0.7 is good). 120
  // tokens are more than the 77 that SD3's two CLIP encoders read; its third encoder reads all of them.
  // `renderer/clip_cut_share` counts the cut prompts.
  sampling+: { max_completion_tokens: 120, temperature: 1.0 },
  algorithm+: { kl_coeff: 0.01 },  // odd words can exploit CLIP: stay near the language model
  optimizer+: {
    backend: if $.world_size == 1 then 'torch' else 'deepspeed',
    [if $.world_size > 1 then 'zero_stage']: 1,  // adapters: see base.libsonnet
    gradient_checkpointing: if $.gpu_gb >= 141 then 'mlp' else true,
  },
  evaluation+: { every_n_iterations: 25, num_samples: 64 },
  checkpoint+: { save_every_n_iterations: 10, keep_every_n_iterations: 100 },
  tracking+: { wandb: 'offline', wandb_project: 'prompt_enhancement' },
}
