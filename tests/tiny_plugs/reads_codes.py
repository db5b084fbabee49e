"""A policy that reads pictures as codes: `type: 'tiny_plugs.reads_codes'`."""

from __future__ import annotations

from tiny_plugs.nothing import EMITS, Config, build, validate

__all__ = ["EMITS", "NEEDS", "Config", "build", "validate"]

NEEDS = frozenset({"source_codes"})
