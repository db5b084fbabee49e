(import 'tiny_thinking.jsonnet') + (import 'control.libsonnet')
