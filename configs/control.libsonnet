// A control: the same run with its rewards shuffled. It must not learn.
{ run_name: super.run_name + '_control', algorithm+: { shuffle_rewards: true } }
