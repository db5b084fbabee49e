// Starts from the model fine-tuned on simple edits.
(import 'base.libsonnet') + {
  num_iterations: 3000,
  policy+: { model_path: 'mair-lab/sft-simple', tokenizer_path: 'BAAI/Emu3-Stage1' },
}
