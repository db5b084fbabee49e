(import 'tiny_earl.jsonnet') + (import 'control.libsonnet')
