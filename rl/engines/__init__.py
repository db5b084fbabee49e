"""Plugins: inference engines, each an `rl.api.engine.Engine`; tests compare the two."""
