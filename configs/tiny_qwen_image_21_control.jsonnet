(import 'tiny_qwen_image_21.jsonnet') + (import 'control.libsonnet')
