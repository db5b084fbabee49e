// As qwen_image_edit.jsonnet, at 8 steps, without guidance, 512 x 512: a picture costs about 1/60
// as much. `lightning=true` on the command line fuses the adapter that was distilled for 8 steps;
// without it, 8 steps give only a rough sketch of what 50 steps draw.
(import 'qwen_image_edit.jsonnet') + {
  lightning:: false,
  prompts_per_iteration: 4 * $.world_size,
  renderer+: {
    num_steps: 8,
    true_cfg_scale: 1.0,
    output_area_px: 512 * 512,
    condition_area_px: 512 * 512,
    policy_image_area_px: 512 * 512,
    batch_size: 8,
  } + if $.lightning then {
    lora_path: 'lightx2v/Qwen-Image-Lightning',
    lora_weight_name: 'Qwen-Image-Edit-Lightning-8steps-V1.0-bf16.safetensors',
    scheduler_overrides: {
      base_shift: std.log(3),
      max_shift: std.log(3),
      shift_terminal: null,
    },
  } else {},
  policy+: { max_prompt_tokens: 1024 },
  judge+: { image_side_px: 512 },
}
