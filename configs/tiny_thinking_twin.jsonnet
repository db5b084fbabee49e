// tiny_thinking without a thought: the same weights, riddles, and numbers of completions and updates.
(import 'tiny_thinking.jsonnet') + {
  run_name: super.run_name + '_twin',
  policy+: { thought: null },
  evaluation+: { thought_gain: false },
}
