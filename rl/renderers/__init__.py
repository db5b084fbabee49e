"""Renderer plugins: frozen picture generators, each an `rl.api.renderer.Renderer`."""
