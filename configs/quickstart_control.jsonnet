// The quickstart's control arm: the same run with its rewards shuffled. It must not learn.
(import 'quickstart.jsonnet') + {
  run_name: 'quickstart_control',
  algorithm+: { shuffle_rewards: true },
}
