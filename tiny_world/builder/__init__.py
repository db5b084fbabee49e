"""Builds `tiny_world/weights` (`python -m tiny_world.builder`); no run needs this package."""

import rl  # noqa: F401 (makes transformers importable beside a CPU torch)
