// The control arm of tiny_earl: the same run with its rewards shuffled. It must not learn.
(import 'tiny_earl.jsonnet') + {
  run_name: 'tiny_earl_control',
  algorithm+: { shuffle_rewards: true },
}
