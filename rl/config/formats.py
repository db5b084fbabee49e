"""Format numbers of what one version writes and another reads.

    config         its key `format`; a file without one has today's
    run folder     the `format` of its config.json, which its records share; without one: 1
    checkpoint     the `format` of its state.json
    adapter        `auto_mapping.format` of its adapter_config.json; without one: 1

A number rises when a name or a meaning changes; a new key with a default does not raise it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CONFIG = 3
"""The one format of configs and run folders that is read."""
CHECKPOINT = 1
ADAPTER = 2
GONE = {
    "checkpoint": ("keep",),
    "renderer": ("attention_backend", "cfg_in_one_forward", "compile_blocks"),
}
"""Section -> keys that runs of today's format may still have written, and nothing reads; of shipped
plugins, whose `type` has no dot."""


def refusal(what: str, number: Any, newest: int, oldest: int = 1) -> str:
    """Why `what`, of that format number (None: it has none), cannot be read; '' where it can."""
    if number is None or (type(number) is int and oldest <= number <= newest):
        return ""
    is_newer = type(number) is int and number > newest
    return f"{what} has the format {number!r}, and this version reads {oldest} to {newest}: " + (
        "a newer one wrote it; update vlm-edit-rl"
        if is_newer
        else "use the version of vlm-edit-rl that wrote it"
    )


def number_of(written: Mapping[str, Any]) -> Any:
    """The format number of a run's file; None for what is no run's, such as a model's config."""
    return written.get("format", 1 if "run_name" in written else None)


def stored(config: Mapping[str, Any], what: str) -> dict[str, Any]:
    """A config that a run has written; `what` is its name in messages. Raises ValueError for one of
    another format."""
    if problem := refusal(what, number_of(config), CONFIG, oldest=CONFIG):
        raise ValueError(problem)
    return {
        name: {key: item for key, item in value.items() if key not in GONE[name]}
        if name in GONE and isinstance(value, Mapping) and "." not in str(value.get("type"))
        else value
        for name, value in config.items()
    }
