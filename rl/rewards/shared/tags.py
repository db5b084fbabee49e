"""Finds `<name>...</name>` blocks in a completion."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

TagName = Annotated[str, Field(pattern=r"^[A-Za-z][\w-]*$")]
"""A tag's name, without the angle brackets."""


def last_block(text: str, name: str) -> str | None:
    """The content of the last complete block of this name; None if there is none."""
    end = text.rfind(f"</{name}>")
    start = text.rfind(f"<{name}>", 0, max(end, 0))
    return None if start < 0 else text[start + len(name) + 2 : end]
