"""The savings one by one, each defeated from outside a run that has them all."""

from __future__ import annotations

SAVINGS: dict = {}
