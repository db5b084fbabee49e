(import 'tiny_stock_editor.jsonnet') + (import 'control.libsonnet')
