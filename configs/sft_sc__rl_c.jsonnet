(import 'earl/sft_sc.libsonnet') + (import 'earl/rl_c.libsonnet')
