"""A reward that is only looked at: `type: 'tiny_plugs.glance'`."""

from __future__ import annotations

from tiny_plugs.nothing import NEEDS, NEEDS_JUDGE, Config, build

__all__ = ["DIAGNOSTIC", "NEEDS", "NEEDS_JUDGE", "Config", "build"]

DIAGNOSTIC = True
