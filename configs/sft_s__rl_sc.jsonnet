(import 'earl/sft_s.libsonnet') + (import 'earl/rl_sc.libsonnet')
