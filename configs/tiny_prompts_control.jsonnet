(import 'tiny_prompts.jsonnet') + (import 'control.libsonnet')
