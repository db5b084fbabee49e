"""Keys and tokens live in the environment only; this keeps them out of everything we write.

What: `scrub`, applied to every text that goes into the run folder, to wandb or to the hub. A key
gets there by accident: an endpoint echoes it in its 401 body, a config writes it out with
`std.extVar`. What not: a licence to put keys into configs.
"""

from __future__ import annotations

import os
import re
from typing import Any

_SECRET_NAME = re.compile(r"(^|_)(API_?KEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS)$", re.I)
_MIN_LENGTH = 8
"""Shorter values are no keys, and replacing every 'test' would garble the record."""


def scrub(text: str, also_names: tuple[str, ...] = ()) -> str:
    """`text` with the value of every secret environment variable replaced by `<NAME>`.

    Secret: named like one (`..._KEY`, `..._TOKEN`, `..._SECRET`, ...) or listed in `also_names`.
    """
    for name, value in os.environ.items():
        is_secret = name in also_names or _SECRET_NAME.search(name) is not None
        if is_secret and len(value) >= _MIN_LENGTH and value in text:
            text = text.replace(value, f"<{name}>")
    return text


def scrubbed(value: Any, also_names: tuple[str, ...] = ()) -> Any:
    """`scrub` applied to every string, keys included, in nested dicts, lists and tuples."""
    if isinstance(value, str):
        return scrub(value, also_names)
    if isinstance(value, dict):
        return {scrubbed(k, also_names): scrubbed(v, also_names) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [scrubbed(item, also_names) for item in value]
    return value
