"""A policy that reads pictures as codes: `type: 'tiny_plugs.reads_codes'`."""

from __future__ import annotations

from tiny_plugs.nothing import Nobody


class ReadsCodes(Nobody):
    needs = frozenset({"source_codes"})
