"""The old name of `rl.api.plugin`: works in this release, with a warning."""

import warnings

from rl.api.plugin import FileConfig, FrozenModelConfig, PlacedConfig, unread
from rl.api.plugin import PluginBase as PlugBase
from rl.api.plugin import PluginConfig as PlugConfig

__all__ = ["FileConfig", "FrozenModelConfig", "PlacedConfig", "PlugBase", "PlugConfig", "unread"]

warnings.warn(
    "rl.api.plug is now rl.api.plugin, with PluginConfig and PluginBase; the next release drops "
    "the old name",
    FutureWarning,
    stacklevel=2,
)
