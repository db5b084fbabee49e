// As qwen_image_21.jsonnet, with the few-step checkpoint at 512 x 512: a picture costs about a twentieth.
// Turbo is the same transformer, distilled for 8 steps without guidance; its noise levels are read from
// it (`sample_sigmas`), and `num_steps` must equal their number. Not tried by us: look at the first
// pictures. `model_path=Qwen/Qwen-Image-2.1` takes the ordinary checkpoint, whose 8 steps give a rough
// sketch of its picture of 40 steps.
(import 'qwen_image_21.jsonnet') + {
  model_path:: 'Qwen/Qwen-Image-2.1-Turbo',
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
