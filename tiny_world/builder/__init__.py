"""Builds `tiny_world/weights` (`python -m tiny_world.builder`); no run needs this package."""
