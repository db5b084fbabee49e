// The control arm of tiny_prompts: the same run with its rewards shuffled. It must not learn.
(import 'tiny_prompts.jsonnet') + {
  run_name: 'tiny_prompts_control',
  algorithm+: { shuffle_rewards: true },
}
