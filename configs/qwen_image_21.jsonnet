// As qwen_image_edit.jsonnet, a generation later: Qwen3-VL-8B writes the description, and its hidden
// states (before the last norm) condition the frozen Qwen-Image-2.1, 7 B and 40 forwards a picture
// without guidance: about a seventh of Edit's FLOPs. A group's sources are gone through once. Meant
// for 8 GPUs of 80 GB (H100), or of 141 GB (`gpu_gb=141`); the judge (scripts/serve_judge.sh) runs
// elsewhere.
//
// Not tried on the released weights: both hub ids, and the licence of Qwen-Image-2.1, are unverified.
//
//   export APP__BASE_EXP_DIR=runs APP__RUN_NAME=my-run
//   export APP__REWARD_FUNCTION_API_BASE=http://judge-host:4877
//   python -m rl.simple_launch configs/qwen_image_21.jsonnet [seed=1 ...]
(import 'qwen_image_edit.jsonnet') + {
  gpu_gb: 80,
  policy+: {
    type: 'qwen3_vl',
    model_path: 'Qwen/Qwen3-VL-8B-Instruct',  // tokenizer and image processor
  },
  renderer: {
    type: 'qwen_image_21',
    model_path: 'Qwen/Qwen-Image-2.1',
    // Complex-Edit has one source a row. Two are what a batch keeps the keys and values of (4.3 GB):
    // a group of training shows one, and held-out prompts are drawn two at a time.
    max_pictures: 2,
    batch_size: 8,
  },
  tracking+: { wandb_project: 'qwen_image_21' },
}
