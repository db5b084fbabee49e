"""Format numbers of the files that one version writes and another reads.

    config         its key `format`; a file without one has the current format
    run folder     the `format` of its config.json, which its records share; without one: 1
    checkpoint     the `format` of its state.json
    adapter        `auto_mapping.format` of its adapter_config.json; without one: 1

A number rises when a name or a meaning changes; a new key with a default does not raise it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CONFIG = 3
"""The only format of configs and run folders that this version reads."""
CHECKPOINT = 1
ADAPTER = 2
GONE = {
    "checkpoint": ("keep",),
    "renderer": ("attention_backend", "cfg_in_one_forward", "compile_blocks"),
}
"""Section -> keys that configs of the current format may still hold, though nothing reads them;
only for shipped plugins, whose `type` has no dot."""


def refusal(what: str, number: Any, newest: int, oldest: int = 1) -> str:
    """Why `what`, which has format `number` (None: it has none), cannot be read; '' if it can."""
    if number is None or (type(number) is int and oldest <= number <= newest):
        return ""
    is_newer = type(number) is int and number > newest
    return f"{what} has the format {number!r}, and this version reads {oldest} to {newest}: " + (
        "a newer one wrote it; update vlm-edit-rl"
        if is_newer
        else "use the version of vlm-edit-rl that wrote it"
    )


def number_of(written: Mapping[str, Any]) -> Any:
    """The format number of a run's file; None for other files, such as a model's config."""
    return written.get("format", 1 if "run_name" in written else None)


def stored(config: Mapping[str, Any], what: str) -> dict[str, Any]:
    """A run's stored config, without the keys of `GONE`; `what` is its name in messages. Raises
    ValueError if it has another format."""
    if problem := refusal(what, number_of(config), CONFIG, oldest=CONFIG):
        raise ValueError(problem)
    return {
        name: {key: item for key, item in value.items() if key not in GONE[name]}
        if name in GONE and isinstance(value, Mapping) and "." not in str(value.get("type"))
        else value
        for name, value in config.items()
    }
