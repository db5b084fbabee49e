"""Format numbers of files; one rises if a name or meaning changes, not for a key with a default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CONFIG = 3
"""The only format of configs and run folders that this version reads. A config has it as its key
`format` (missing: the current format), a run folder in its config.json (missing: 1)."""
CHECKPOINT = 1
"""`format` of state.json."""
ADAPTER = 2
"""`auto_mapping.format` of adapter_config.json; missing: 1."""
GONE = {
    "checkpoint": ("keep",),
    "engine": ("share_base_weights",),
    "evaluation": ("judge",),
    "judge": ("audit_max_fallback", "audit_min_accuracy"),
    "renderer": ("attention_backend", "cfg_in_one_forward", "compile_blocks"),
}
"""Section -> keys that configs of the current format may still hold, though nothing reads them;
only for shipped plugins, whose `type` has no dot."""


def refusal(label: str, number: Any, newest: int, oldest: int = 1) -> str:
    """Why `label`, which has format `number` (None: it has none), cannot be read; '' if it can."""
    if number is None or (type(number) is int and oldest <= number <= newest):
        return ""
    is_newer = type(number) is int and number > newest
    return f"{label} has the format {number!r}, and this version reads {oldest} to {newest}: " + (
        "a newer one wrote it; update vlm-edit-rl"
        if is_newer
        else "use the version of vlm-edit-rl that wrote it"
    )


def number_of(written: Mapping[str, Any]) -> Any:
    """The format number of a run's file; None for other files, such as a model's config."""
    return written.get("format", 1 if "run_name" in written else None)


def stored(config: Mapping[str, Any], label: str) -> dict[str, Any]:
    """A run's stored config, without the keys of `GONE`; `label` is its name in messages.
    Raises ValueError if it has another format."""
    if problem := refusal(label, number_of(config), CONFIG, oldest=CONFIG):
        raise ValueError(problem)
    return {
        name: {key: item for key, item in value.items() if key not in GONE[name]}
        if name in GONE and isinstance(value, Mapping) and "." not in str(value.get("type"))
        else value
        for name, value in config.items()
    }
