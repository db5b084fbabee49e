"""Finds which shipped policy loads a model folder that lies alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl import build
from rl.api import find
from rl.files.atomic import row_of
from rl.policies.shared.loading import local_folder
from rl.policies.shared.policy import TrainedPolicy
from rl.record import adapter_base


def policies() -> Mapping[str, type[TrainedPolicy[Any]]]:
    """Type -> plugin."""
    found = {}
    for name in build.plugs_of("policies"):
        module, _ = find.import_plug(build.module_of("policies", name))
        [plug] = find.plugs_in(module, build.ROOMS["policies"])
        assert issubclass(plug, TrainedPolicy)
        found[name] = plug
    return found


def of_folder(model: Path, base: str | None = None) -> str:
    """Type by the adapter's config, else by the config.json of its base (or `base`), or of the
    whole model; 'qwen2_5_vl' where none says it."""
    path: Any = str(model)
    if (model / adapter_base.ADAPTER_CONFIG).is_file():
        noted = adapter_base.read_config(model)
        model_class = adapter_base.model_class_of(noted)
        for name, plug in policies().items():
            if model_class in plug.model_classes:
                return name
        path = base or noted.get(adapter_base.NAME)
    try:
        file = local_folder(str(path), None, ["config.json"]) / "config.json"
        kind = (row_of(file.read_bytes()) or {}).get("model_type")
    except (OSError, ValueError):  # loading it will say what is wrong
        kind = None
    return next((n for n, plug in policies().items() if kind in plug.model_types), "qwen2_5_vl")
