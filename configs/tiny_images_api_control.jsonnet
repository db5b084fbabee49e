(import 'tiny_images_api.jsonnet') + (import 'control.libsonnet')
