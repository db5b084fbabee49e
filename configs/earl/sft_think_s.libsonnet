// Starts from the model fine-tuned to think before simple edits: the thought and the picture need a
// longer context and, for memory, a smaller micro-batch.
(import 'base.libsonnet') + {
  num_iterations: 3000,
  policy+: {
    model_path: 'mair-lab/thinking-sft-simple',
    tokenizer_path: 'BAAI/Emu3-Stage1',
    assistant_prefill: " Let's think step by step. <|start thinking|>",
    max_prompt_tokens: 2048,
  },
  engine+: { max_model_len: 4096 },
  sampling+: { max_completion_tokens: 2048 },
  optimizer+: { max_tokens_per_micro_batch: 4 * $.engine.max_model_len },
}
