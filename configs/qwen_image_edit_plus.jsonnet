// As qwen_image_edit.jsonnet, with Qwen-Image-Edit-Plus as the editor: its policy reads the source at
// 384 x 384 instead of 1024 x 1024, a quarter of the prompt.
(import 'qwen_image_edit.jsonnet') + {
  renderer: {
    type: 'qwen_image_edit_plus',
    model_path: 'Qwen/Qwen-Image-Edit-2511',  // or 'Qwen/Qwen-Image-Edit-2509'
    num_steps: 40,
    true_cfg_scale: 4.0,
    batch_size: 4,
    max_pictures: 1,  // up to 3 for rows with several source pictures
  },
  policy+: { max_prompt_tokens: 1024 },
}
