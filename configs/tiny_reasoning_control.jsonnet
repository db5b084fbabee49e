// The control arm of tiny_reasoning: the same run with its rewards shuffled. It must not learn.
(import 'tiny_reasoning.jsonnet') + {
  run_name: 'tiny_reasoning_control',
  algorithm+: { shuffle_rewards: true },
}
