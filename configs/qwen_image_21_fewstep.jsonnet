// As qwen_image_21.jsonnet, with a few-step checkpoint at 512 x 512: a picture costs about a twentieth.
// `model_path=...` names a Turbo checkpoint, diffusers' 21Turbo: the same transformer with its own
// sigmas, which are read from it (`sample_sigmas`); `num_steps` must equal their number. We know of no
// released one; without it 8 steps give a rough sketch of the picture of 40 steps.
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
  policy+: { max_prompt_tokens: 768 },  // two pictures are 512
  judge+: { image_side_px: 512 },
}
