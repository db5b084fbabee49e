"""Data plugins of the tiny world; a config names them by dotted path: `tiny_world.data.shapes`."""
