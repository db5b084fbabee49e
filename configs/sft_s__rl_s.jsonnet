(import 'earl/sft_s.libsonnet') + (import 'earl/rl_s.libsonnet')
