// Starts from the model fine-tuned on simple and complex edits together. EARL's configs name it, but
// it is not published: set policy.model_path=... to a model of your own.
(import 'base.libsonnet') + {
  policy+: {
    model_path: 'Image-Editing/Emu3-Base-SFT-without_cot-May06_mixed_gc_lr1e-4-checkpoint-4800',
  },
}
