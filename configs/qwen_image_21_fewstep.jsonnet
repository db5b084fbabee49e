// As qwen_image_21.jsonnet, with the few-step checkpoint at 512 x 512: a picture costs about a twentieth.
// Turbo is the same transformer, distilled for 8 steps without guidance. The checkpoint has its own noise
// levels (`sample_sigmas`), which are used, and `num_steps` must equal their number. We have not drawn with
// it: look at the first pictures. `model_path=Qwen/Qwen-Image-2.1` takes the ordinary checkpoint, whose
// pictures after 8 steps are rough sketches of those after 40.
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
