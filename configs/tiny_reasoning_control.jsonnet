(import 'tiny_reasoning.jsonnet') + (import 'control.libsonnet')
