(import 'earl/sft_s.libsonnet') + (import 'earl/rl_c.libsonnet')
