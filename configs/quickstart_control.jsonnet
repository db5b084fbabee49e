(import 'quickstart.jsonnet') + (import 'control.libsonnet')
