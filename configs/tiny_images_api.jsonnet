// tiny_stock_editor with its editor behind HTTP, in a server that has OpenAI's images API. Start the server first:
//
//   python -m tiny_world.images_server 8901 tiny-editor &
//   rl train configs/tiny_images_api.jsonnet
(import 'tiny_stock_editor.jsonnet') + {
  run_name: 'tiny_images_api',
  renderer: {
    type: 'images_api',
    api_base: 'http://127.0.0.1:8901',
    model: 'tiny-editor',
    height_px: 64,
    width_px: 64,
  },
}
