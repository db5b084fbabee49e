// Starts from the model fine-tuned on simple and complex edits together. EARL named it so; where it
// cannot be had, name your own: policy.model_path=...
(import 'base.libsonnet') + {
  policy+: {
    model_path: 'Image-Editing/Emu3-Base-SFT-without_cot-May06_mixed_gc_lr1e-4-checkpoint-4800',
  },
}
