// As qwen_image_edit.jsonnet, a generation later: Qwen3-VL-8B writes the description, and its hidden
// states (before the last norm) condition the frozen Qwen-Image-2.1 (7 B, 40 forwards per picture
// without guidance: about a seventh of Edit's FLOPs). A group's source pictures are encoded once.
// Meant for 8 GPUs of 80 GB (H100), or of 141 GB (`gpu_gb=141`); the judge (scripts/serve_judge.sh)
// runs elsewhere.
//
// Not tried with the released weights; both hub ids are unverified. Licences: docs/models.md.
//
//   export APP__BASE_EXP_DIR=runs APP__RUN_NAME=my-run
//   export APP__REWARD_FUNCTION_API_BASE=http://judge-host:4877
//   rl train configs/qwen_image_21.jsonnet [seed=1 ...]
(import 'qwen_image_edit.jsonnet') + {
  gpu_gb: 80,
  policy+: {
    type: 'qwen3_vl',
    model_path: 'Qwen/Qwen3-VL-8B-Instruct',  // tokenizer and image processor
  },
  renderer: {
    type: 'qwen_image_21',
    model_path: 'Qwen/Qwen-Image-2.1',
    // Complex-Edit has one source per row. Two, because a batch keeps the keys and values of so many
    // pictures (4.3 GB): training draws one group at a time, held-out evaluation two prompts.
    max_pictures: 2,
    batch_size: if $.gpu_gb >= 141 then 8 else 4,  // a group, or half of one
  },
  tracking+: { wandb_project: 'qwen_image_21' },
}
