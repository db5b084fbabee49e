(import 'earl/sft_think_s.libsonnet') + (import 'earl/rl_sc.libsonnet')
