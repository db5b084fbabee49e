// The twin of tiny_thinking that writes at once: the same weights, the same riddles, the same number
// of completions and updates.
(import 'tiny_thinking.jsonnet') + {
  run_name: super.run_name + '_twin',
  policy+: { thought: null },
  evaluation+: { thought_gain: false },
}
