// As qwen_image_21.jsonnet, with a few-step checkpoint, and 512 x 512: a picture costs about a
// twentieth. `model_path=...` names a Turbo checkpoint: what diffusers calls 21Turbo is the same
// transformer with sigmas of its own, which are read from it (`sample_sigmas`); `num_steps` must be
// their number. None is known to be released: without one 8 steps are a rough sketch of what 40 give.
(import 'qwen_image_21.jsonnet') + {
  model_path:: 'Qwen/Qwen-Image-2.1',
  num_steps:: 8,
  prompts_per_iteration: 4 * $.world_size,
  renderer+: {
    model_path: $.model_path,
    num_steps: $.num_steps,
    output_area_px: 512 * 512,
    condition_area_px: 512 * 512,
    policy_image_area_px: 512 * 512,
  },
  policy+: { max_prompt_tokens: 1024 },
  judge+: { image_side_px: 512 },
}
