(import 'earl/sft_sc2stage.libsonnet') + (import 'earl/rl_sc.libsonnet')
