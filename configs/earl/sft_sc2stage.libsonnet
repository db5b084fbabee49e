// Starts from the model fine-tuned on simple edits first, on complex ones in a second stage. EARL
// named it so; where it cannot be had, name your own: policy.model_path=...
(import 'base.libsonnet') + {
  policy+: {
    model_path:
      'Image-Editing/Emu3-Base-SFT-without_cot-May07_mixed_gc_post_lr1e-4-checkpoint-1200',
  },
}
