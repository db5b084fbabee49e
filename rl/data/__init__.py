"""Plugins: data sources, each an `rl.api.data.DataSource` in its own file."""
