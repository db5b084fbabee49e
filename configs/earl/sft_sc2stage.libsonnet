// Starts from the model fine-tuned on simple edits first, on complex ones in a second stage. EARL's
// configs name it, but it is not published: set policy.model_path=... to a model of your own.
(import 'base.libsonnet') + {
  policy+: {
    model_path:
      'Image-Editing/Emu3-Base-SFT-without_cot-May07_mixed_gc_post_lr1e-4-checkpoint-1200',
  },
}
