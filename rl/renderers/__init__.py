"""Plugin room: frozen generators of pictures, each an `rl.api.renderer.Renderer`."""
